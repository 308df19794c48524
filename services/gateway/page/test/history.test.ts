import assert from "node:assert/strict";
import { test } from "node:test";
import { extended, lanes, meanPhases, NO_HISTORY, phasesOf, WINDOW_S } from "../src/live/history.ts";
import { snapshot, step, view } from "./snapshots.ts";

test("a sample has the figures of its snapshot", () => {
  const { samples } = extended(NO_HISTORY, null, snapshot(100, view()));
  const [sample] = samples;
  assert.equal(sample?.running, 3);
  assert.equal(sample?.waiting, 2);
  assert.equal(sample?.tokensPerS, 12.5);
  assert.deepEqual(sample?.itl, [0.01, 0.02, 0.03]);
  assert.equal(sample?.hitShare, 0.25);
  assert.equal(sample?.newPreemptions, null);
});

test("preemptions are counted between snapshots of one scheduler", () => {
  const load = view().load;
  const first = snapshot(100, view());
  const second = snapshot(100.5, view({ load: { ...load, num_preemptions: 9 } }));
  const restarted = snapshot(101, view({ epoch: 2, load: { ...load, num_preemptions: 1 } }));
  let history = extended(NO_HISTORY, null, first);
  history = extended(history, first, second);
  assert.equal(history.samples[1]?.newPreemptions, 4);
  history = extended(history, second, restarted);
  assert.equal(history.samples[2]?.newPreemptions, null);
});

test("a minute is kept", () => {
  let history = NO_HISTORY;
  let before = null;
  for (let atS = 0; atS < 200; atS += 0.5) {
    const shown = snapshot(atS, view({ at_s: atS }));
    history = extended(history, before, shown);
    before = shown;
  }
  assert.ok(history.samples.length <= 2 * WINDOW_S + 3);
  assert.ok((history.samples[0]?.atS ?? 0) >= 199.5 - WINDOW_S - 1);
});

test("changes are marked", () => {
  const [here, gone] = [snapshot(1, view()), snapshot(2, null)];
  const other = snapshot(3, view({ policies: { ...view().policies, preset: "sglang", order: "lpm" } }));
  const single = snapshot(3, view({ policies: { ...view().policies, preset: "", order: "lpm" } }));
  const texts = (before: typeof here, after: typeof here) =>
    extended(NO_HISTORY, before, after).marks.map((mark) => mark.text);
  assert.deepEqual(texts(here, here), []);
  assert.deepEqual(texts(here, gone), ["scheduler gone"]);
  assert.deepEqual(texts(gone, here), ["scheduler back"]);
  assert.deepEqual(texts(here, other), ["preset sglang"]);
  assert.deepEqual(texts(here, single), ["order lpm"]);
});

test("steps of a scheduler before a restart are forgotten", () => {
  const first = snapshot(100, view({ steps: [step({ ended_s: 99.9 })] }));
  const second = snapshot(100.5, view({ epoch: 2, at_s: 100.5, steps: [step({ step: 7, ended_s: 100.4 })] }));
  const history = extended(extended(NO_HISTORY, null, first), first, second);
  assert.deepEqual(history.steps.map((one) => one.step), [7]);
});

test("the phases of a step add up to its time", () => {
  for (const computed_s of [0, 0.02, 5]) {
    const one = step({ computed_s });
    const { scheduler, link, device } = phasesOf(one);
    assert.ok(Math.abs(scheduler + link + device - (one.ended_s - one.planned_s)) < 1e-9);
    assert.ok(link >= 0 && device >= 0);
  }
  assert.equal(meanPhases([]), null);
  assert.ok(Math.abs((meanPhases([step(), step()])?.device ?? 0) - 0.02) < 1e-9);
});

test("steps that overlap are in different lanes", () => {
  const steps = [
    step({ step: 1, planned_s: 0, ended_s: 2 }),
    step({ step: 2, planned_s: 1, ended_s: 3 }),
    step({ step: 3, planned_s: 2, ended_s: 4 }),
  ];
  assert.deepEqual(lanes(steps.toReversed(), 4).map((one) => [one.step.step, one.lane]), [[1, 0], [2, 1], [3, 0]]);
  assert.deepEqual(lanes(steps, 1).map((one) => one.lane), [0, 0, 0]);
});
