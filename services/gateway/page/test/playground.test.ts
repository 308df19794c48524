import assert from "node:assert/strict";
import { test } from "node:test";
import { asked, extended, tokensPerS, type Chunk } from "../src/playground/answer.ts";
import { chatBody, completionBody, InputProblem, NO_OPTIONS } from "../src/playground/body.ts";
import { fieldsOf, valueOf, type Field, type OpenApi, type Schema } from "../src/playground/fields.ts";
import { DEFAULT_MIX, mixProblem, partBody, quantile, rowsOf } from "../src/playground/mix.ts";
import { restored } from "../src/playground/run-mix.ts";

const PATH = "/v1/completions";

function api(properties: Record<string, Schema>): OpenApi {
  const schema = { $ref: "#/components/schemas/Body" };
  return {
    paths: { [PATH]: { post: { requestBody: { content: { "application/json": { schema } } } } } },
    components: { schemas: { Body: { properties } } },
  };
}

const nullable = (...choices: Schema[]): Schema => ({ anyOf: [...choices, { type: "null" }] });
const field = (name: string, kind: Field["kind"]): Field => ({ name, kind, help: "", range: "", values: [] });

test("the options are those of the server's description, the usual ones first", () => {
  const found = fieldsOf(
    api({
      zeta: nullable({ type: "string" }),
      prompt: { type: "string" },
      audio: { description: "Not supported. These values change nothing.", enum: [null] },
      temperature: {
        ...nullable({ type: "number" }, { type: "string" }),
        description: "divides the logits",
        minimum: 0,
        maximum: 2,
      },
      side: nullable({ enum: ["left", "right"], type: "string" }),
      stop: nullable({ type: "string" }, { type: "array", items: { type: "string" } }),
      logit_bias: nullable({ type: "object" }),
      echo: nullable({ type: "boolean" }, { type: "string" }),
    }),
    PATH,
  );
  assert.deepEqual(
    found.map(({ name, kind }) => [name, kind]),
    [
      ["temperature", "number"],
      ["stop", "lines"],
      ["echo", "boolean"],
      ["logit_bias", "json"],
      ["side", "choice"],
      ["zeta", "text"],
    ],
  );
  assert.deepEqual([found[0]?.help, found[0]?.range], ["divides the logits", "0 to 2"]);
  assert.deepEqual(found[4]?.values, ["left", "right"]);
});

test("ranges say which ends they have", () => {
  const ranges = (schema: Schema) => fieldsOf(api({ x: { type: "number", ...schema } }), PATH)[0]?.range;
  assert.equal(ranges({ exclusiveMinimum: 0, maximum: 1 }), "above 0 to 1");
  assert.equal(ranges({ exclusiveMinimum: 0 }), "above 0");
  assert.equal(ranges({ minimum: -1, maximum: 2147483647 }), "from -1");
  assert.equal(ranges({ maximum: 5 }), "up to 5");
  assert.equal(ranges({}), "");
});

test("an entered text becomes a JSON value, and an empty text leaves its field out", () => {
  assert.equal(valueOf(field("n", "number"), " "), undefined);
  assert.equal(valueOf(field("n", "number"), "2"), 2);
  assert.equal(valueOf(field("n", "number"), "two"), "two", "the server says what is wrong");
  assert.equal(valueOf(field("echo", "boolean"), "false"), false);
  assert.deepEqual(valueOf(field("stop", "lines"), "a\n\n b "), ["a", " b "]);
  assert.deepEqual(valueOf(field("bias", "json"), '{"5": -1}'), { 5: -1 });
});

test("a body has what is set, and streams", () => {
  const stream = { stream: true, stream_options: { include_usage: true } };
  const fields = [field("temperature", "number"), field("stop", "lines")];
  const options = { ...NO_OPTIONS, values: { temperature: "0" }, logprobs: null };
  assert.deepEqual(completionBody(fields, options, "hello"), { prompt: "hello", temperature: 0, ...stream });
  assert.equal(completionBody(fields, { ...options, logprobs: 3 }, "hello")["logprobs"], 3);
  const chat = chatBody(fields, { ...options, logprobs: 3, tools: "[1]", toolChoice: "required" }, []);
  assert.deepEqual(
    [chat["logprobs"], chat["top_logprobs"], chat["tools"], chat["tool_choice"]],
    [true, 3, [1], "required"],
  );
  const structured = (structure: "json" | "regex" | "choice", structureText: string) =>
    completionBody(fields, { ...options, structure, structureText }, "")["structured_outputs"];
  assert.deepEqual(structured("json", '{"type": "object"}'), { json: { type: "object" } });
  assert.deepEqual(structured("regex", "[0-9]+"), { regex: "[0-9]+" });
  assert.deepEqual(structured("choice", "yes\nno\n"), { choice: ["yes", "no"] });
});

test("invalid JSON is named before anything is sent", () => {
  const broken = { ...NO_OPTIONS, tools: "[" };
  assert.throws(
    () => chatBody([], broken, []),
    (error) => error instanceof InputProblem && error.param === "tools",
  );
  const bias = { ...NO_OPTIONS, values: { bias: "{" } };
  assert.throws(() => completionBody([field("bias", "json")], bias, ""), /bias is no JSON/);
});

test("a chat's chunks become text, tokens, tool calls and figures", () => {
  const top = [{ token: "7", logprob: -0.1 }];
  const chunks: [number, Chunk][] = [
    [110, { id: "chat-1", choices: [{ index: 0, delta: { content: "" } }] }],
    [
      150,
      {
        choices: [
          {
            index: 0,
            delta: { content: "7" },
            logprobs: { content: [{ token: "7", logprob: -0.1, top_logprobs: top }] },
          },
        ],
      },
    ],
    [200, { choices: [{ index: 0, delta: { reasoning_content: "so" } }] }],
    [250, { choices: [{ index: 0, delta: { tool_calls: [{ index: 0, id: "c", function: { name: "f" } }] } }] }],
    [
      350,
      {
        choices: [
          {
            index: 0,
            delta: { tool_calls: [{ index: 0, function: { arguments: "{}" } }] },
            finish_reason: "tool_calls",
          },
        ],
      },
    ],
    [360, { choices: [], usage: { prompt_tokens: 9, completion_tokens: 5 } }],
  ];
  const answer = chunks.reduce((before, [nowMs, chunk]) => extended(before, chunk, nowMs), asked(100));
  assert.deepEqual([answer.id, answer.firstMs, answer.lastMs], ["chat-1", 150, 350]);
  assert.deepEqual(answer.samples, [
    {
      text: "7",
      reasoning: "so",
      tokens: [{ text: "7", logprob: -0.1, top: [{ text: "7", logprob: -0.1 }] }],
      toolCalls: [{ id: "c", name: "f", arguments: "{}" }],
      finish: "tool_calls",
    },
  ]);
  assert.equal(tokensPerS(answer), 20);
});

test("a completion's samples keep their order and log probabilities, whichever sample comes first", () => {
  const logprobs = { tokens: [" a"], token_logprobs: [-0.2], top_logprobs: [{ " b": -1, " a": -0.2 }] };
  const first = extended(asked(0), { choices: [{ index: 1, text: " a", logprobs }] }, 5);
  const answer = extended(first, { choices: [{ index: 0, text: " c", finish_reason: "stop" }] }, 9);
  assert.deepEqual(
    answer.samples.map((sample) => sample.text),
    [" c", " a"],
  );
  assert.deepEqual(answer.samples[1]?.tokens[0]?.top, [
    { text: " a", logprob: -0.2 },
    { text: " b", logprob: -1 },
  ]);
  assert.equal(tokensPerS(answer), null, "without usage");
});

test("prompts of a mix share no prefix, neither with each other nor with another run", () => {
  const [part] = DEFAULT_MIX;
  assert.ok(part);
  const body = partBody({ ...part, count: 2, prompt: "x", times: 3, tenant: "" }, "salt");
  assert.deepEqual(body["prompt"], ["0. x x x", "1. x x x"]);
  assert.deepEqual([body["cache_salt"], "tenant" in body], ["salt", false]);
});

test("a mix that cannot run says why", () => {
  const [part] = DEFAULT_MIX;
  assert.ok(part);
  assert.equal(mixProblem(DEFAULT_MIX), "");
  assert.match(mixProblem([]), /no requests/);
  assert.match(mixProblem([{ ...part, count: 1.5 }]), /whole numbers/);
  assert.match(mixProblem([{ ...part, afterS: NaN }]), /whole numbers/);
  assert.match(mixProblem([{ ...part, prompt: " " }]), /no prompt/);
  assert.match(mixProblem([{ ...part, count: 257 }]), /at most 256/);
});

test("a run has figures for each part", () => {
  const timings = [1, 2, 3, 4].map((ttftS) => ({ part: 0, ttftS, tokenS: 0.5, e2eS: 9 }));
  const rows = rowsOf({ preset: "p", timings, durationS: 1, numTokens: 1 }, DEFAULT_MIX);
  assert.deepEqual(
    rows.map((row) => [row.label, row.ttft]),
    [
      ["flood", [2, 4]],
      ["questions", [null, null]],
    ],
  );
  assert.equal(quantile([], 0.5), null);
});

test("the policies before a comparison come back as a preset, or each by its name", () => {
  const kinds = { order: "fcfs", capacity: "c", batch: "b", preemption: "e", placement: "l" };
  const rest = { policies: kinds, options: { watermark: 0.01 }, presets: [], known: {} as never, why_not_settable: null };
  assert.deepEqual(restored({ preset: "paceline", ...rest }), { preset: "paceline", options: { watermark: 0.01 } });
  assert.deepEqual(restored({ preset: "", ...rest }), { ...kinds, options: { watermark: 0.01 } });
});
