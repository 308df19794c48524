/** The body of a request from what a person has entered. */

import { valueOf, type Field } from "./fields.ts";

export const STRUCTURES = ["none", "json", "regex", "choice", "grammar"] as const;
export type Structure = (typeof STRUCTURES)[number];

export interface Options {
  /** Texts by the name of their field. */
  values: Readonly<Record<string, string>>;
  /** How many alternatives of each token; null: no log probabilities. */
  logprobs: number | null;
  structure: Structure;
  structureText: string;
  /** JSON: a list of tools; "" for none. */
  tools: string;
  toolChoice: "auto" | "required" | "none";
}

export const NO_OPTIONS: Options = {
  values: {},
  logprobs: 4,
  structure: "none",
  structureText: "",
  tools: "",
  toolChoice: "auto",
};

/** A field that cannot be sent as it stands. */
export class InputProblem extends Error {
  readonly param: string;

  constructor(param: string, message: string) {
    super(message);
    this.name = "InputProblem";
    this.param = param;
  }
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string | null;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

/** The fields of the options. Throws InputProblem for invalid JSON. */
function common(fields: Field[], options: Options): Record<string, unknown> {
  const body: Record<string, unknown> = { stream: true, stream_options: { include_usage: true } };
  for (const field of fields) {
    const value = parsed(field.name, () => valueOf(field, options.values[field.name] ?? ""));
    if (value !== undefined) body[field.name] = value;
  }
  const structured = structureOf(options);
  if (structured) body["structured_outputs"] = structured;
  return body;
}

function structureOf({ structure, structureText }: Options): Record<string, unknown> | null {
  switch (structure) {
    case "none":
      return null;
    case "json":
      return { json: parsed("structured_outputs", () => JSON.parse(structureText) as unknown) };
    case "choice":
      return { choice: structureText.split("\n").filter((line) => line !== "") };
    default:
      return { [structure]: structureText };
  }
}

function parsed<T>(param: string, parse: () => T): T {
  try {
    return parse();
  } catch (error) {
    throw new InputProblem(param, `${param} is no JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}

export function chatBody(fields: Field[], options: Options, messages: Message[]): Record<string, unknown> {
  const body = { messages, ...common(fields, options) };
  if (options.logprobs !== null) Object.assign(body, { logprobs: true, top_logprobs: options.logprobs });
  if (options.tools.trim()) {
    const tools = parsed("tools", () => JSON.parse(options.tools) as unknown);
    Object.assign(body, { tools, tool_choice: options.toolChoice });
  }
  return body;
}

export function completionBody(fields: Field[], options: Options, prompt: string): Record<string, unknown> {
  const body = { prompt, ...common(fields, options) };
  return options.logprobs === null ? body : { ...body, logprobs: options.logprobs };
}
