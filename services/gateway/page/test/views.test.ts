import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiProblem } from "../src/api.ts";
import { reasonClass } from "../src/life/reasons.ts";
import { hasEnded, phases, totals, waits } from "../src/life/timeline.ts";
import { EventParser } from "../src/live/sse.ts";
import { NO_HISTORY } from "../src/live/history.ts";
import type { LiveState } from "../src/live/source.ts";
import { connectionSaid } from "../src/live/status.tsx";
import { rowsOf } from "../src/live/tree-rows.ts";
import { parseRoute, requestHref } from "../src/shell/route.ts";
import type { TimelineSpan } from "../src/types.ts";
import { node, snapshot, view } from "./snapshots.ts";

test("events are complete before they are shown, wherever the stream is cut", () => {
  const stream = 'data: {"a": 1}\n\ndata: {"b":\ndata: 2}\r\n\r\n: comment\n\ndata: x\n\n';
  const expected = ['{"a": 1}', '{"b":\n2}', "x"];
  for (let cut = 0; cut <= stream.length; cut++) {
    const parser = new EventParser();
    assert.deepEqual([...parser.feed(stream.slice(0, cut)), ...parser.feed(stream.slice(cut))], expected);
  }
});

test("the page says plainly what is missing, and since when", () => {
  const whole = snapshot(100, view());
  const state: LiveState = {
    snapshot: whole,
    lastWhole: whole,
    history: NO_HISTORY,
    problem: null,
    silentSince: null,
    withoutSchedulerSince: null,
  };
  const said = (change: Partial<LiveState>) => connectionSaid({ ...state, ...change }, 10_000).text;
  assert.equal(said({}), "");
  assert.equal(said({ snapshot: null }), "Connecting …");
  assert.match(said({ silentSince: 4000 }), /No connection to the gateway for 6 s/);
  const gone = { snapshot: snapshot(101, null), withoutSchedulerSince: 7000 };
  assert.match(said(gone), /No connection to the scheduler for 3 s\. 2 live requests wait for it\./);
  assert.match(said({ snapshot: snapshot(101, view({ cache_connected: false })) }), /no connection to the cache/);
  assert.match(said({ problem: new ApiProblem(429, "64 viewers watch") }), /64 viewers watch/);
});

test("every id comes back from its link", () => {
  for (const id of ["cmpl-1", "a/b", "ü %2F #", "%"]) {
    assert.deepEqual(parseRoute(requestHref(id)), { view: "request", id });
  }
  assert.deepEqual(parseRoute(""), { view: "live", id: "" });
  assert.deepEqual(parseRoute("#/nothing"), { view: "live", id: "" });
  assert.equal(parseRoute("#/playground").view, "playground");
});

function span(reason: string, from_s: number, to_s = from_s): TimelineSpan {
  return { reason, detail: "", behind: null, worker: null, from_s, to_s, first_decision: 1, last_decision: 1 };
}

test("the phases of a request cover its whole life", () => {
  const spans = [
    span("waiting", 0),
    span("blocks", 0.1, 0.9),
    span("running", 1),
    span("preempted", 3),
    span("running", 4),
    span("ended", 6),
  ];
  const bars = phases(spans, 6);
  assert.deepEqual(
    bars.map((bar) => [bar.reason, bar.fromS, bar.toS]),
    [["waiting", 0, 1], ["running", 1, 3], ["preempted", 3, 4], ["running", 4, 6]],
  );
  assert.deepEqual(totals(bars), { runs: 4, waits: 1, back: 1, ended: 0 });
  assert.deepEqual(waits(spans).map((one) => one.reason), ["blocks"]);
  assert.ok(hasEnded(spans));
  assert.equal(phases(spans.slice(0, 3), 7).at(-1)?.toS, 7);
});

test("each reason has a colour", () => {
  assert.deepEqual(["running", "drafts", "order", "held", "ended"].map(reasonClass), ["runs", "runs", "waits", "back", "ended"]);
});

test("branches that save nothing share a row", () => {
  const nodes = [
    node(1, null, { saved_tokens: 5 }),
    node(2, 1, { saved_tokens: 3 }),
    node(3, 1),
    node(4, 3),
    node(5, 1, { saved_tokens: 9 }),
    node(6, 99),
  ];
  const rows = rowsOf(nodes, new Set());
  assert.deepEqual(
    rows.map((row) => (row.kind === "node" ? [row.node.id, row.depth] : ["unused", row.depth, row.numNodes, row.numTokens])),
    [[1, 0], [5, 1], [2, 1], ["unused", 1, 2, 32], ["unused", 0, 1, 16]],
  );
  assert.equal(rowsOf(nodes, new Set([1])).length, 2);
});
