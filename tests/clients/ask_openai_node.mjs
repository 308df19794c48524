// The official client for Node. It prints the same lines as checks.py.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.PACELINE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.env.PACELINE_MODEL_NAME;
const messages = [{ role: "user", content: "Tell me a story." }];
const schema = {
  type: "object",
  properties: { name: { type: "string", enum: ["Paris", "Rome"] }, people: { type: "integer", enum: [1, 2] } },
  required: ["name", "people"],
  additionalProperties: false,
};

function assert(value, what) {
  if (!value) throw new Error(what);
}

const checks = {
  async models() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert(names.includes(model), `models: ${names}`);
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 16 });
    assert(answer.choices[0].message.content, "no content");
  },
  async stream() {
    let text = "";
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 16, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert(text, "no text");
  },
  async "structured output"() {
    const response_format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 200, response_format });
    assert(Number.isInteger(JSON.parse(answer.choices[0].message.content).people), "no number");
  },
  async "tool call"() {
    const tools = [{ type: "function", function: { name: "city", parameters: schema } }];
    const answer = await client.chat.completions.create({
      model, messages, max_tokens: 200, tools, tool_choice: "required",
    });
    assert(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).name !== undefined, "no name");
  },
};

let failed = false;
for (const [check, run] of Object.entries(checks)) {
  try {
    await run();
    console.log(JSON.stringify({ check, ok: true }));
  } catch (error) {
    failed = true;
    console.log(JSON.stringify({ check, ok: false, error: String(error).slice(0, 300) }));
  }
}
process.exit(failed ? 1 : 0);
