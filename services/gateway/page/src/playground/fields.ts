/** The options of a request, read from /openapi.json: what the server declares is not repeated here. */

/** The part of JSON Schema that the gateway's description uses. */
export interface Schema {
  $ref?: string;
  type?: string | string[];
  description?: string;
  enum?: unknown[];
  const?: unknown;
  anyOf?: Schema[];
  items?: Schema;
  properties?: Record<string, Schema>;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
}

export interface OpenApi {
  paths: Record<string, { post?: { requestBody?: { content: Record<string, { schema: Schema }> } } }>;
  components: { schemas: Record<string, Schema> };
}

/** `lines`: a list of texts, one a line. `json`: anything else, as JSON. */
export type Kind = "number" | "boolean" | "choice" | "text" | "lines" | "json";

export interface Field {
  name: string;
  kind: Kind;
  help: string;
  /** The range as a text, such as "0 to 2"; "" without one. */
  range: string;
  /** Of a choice. */
  values: string[];
}

/** The fields for which the playground has its own controls. */
const HANDLED = new Set([
  ...["messages", "prompt", "model", "stream", "stream_options", "logprobs", "top_logprobs"],
  ...["tools", "tool_choice", "response_format", "structured_outputs", "request_id"],
]);
/** The description of a field that is accepted and changes nothing, or has another name. */
const WITHOUT_EFFECT = /^(Not supported|Called|Ignored)\b/;
/** Shown first, in this order; the others stand under "More options". */
const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n"];

/** The options of a path, the usual ones first. */
export function fieldsOf(api: OpenApi, path: string): Field[] {
  const body = api.paths[path]?.post?.requestBody?.content["application/json"]?.schema;
  const properties = Object.entries((body && resolved(api, body).properties) ?? {});
  const fields = properties
    .filter(([name, schema]) => !HANDLED.has(name) && !WITHOUT_EFFECT.test(schema.description ?? ""))
    .map(([name, schema]) => fieldOf(api, name, schema));
  const position = (field: Field) => (isUsual(field) ? FIRST.indexOf(field.name) : FIRST.length);
  return fields.sort((a, b) => position(a) - position(b) || a.name.localeCompare(b.name));
}

export function isUsual(field: Field): boolean {
  return FIRST.includes(field.name);
}

function resolved(api: OpenApi, schema: Schema): Schema {
  const name = schema.$ref?.split("/").pop();
  return name === undefined ? schema : (api.components.schemas[name] ?? {});
}

function fieldOf(api: OpenApi, name: string, schema: Schema): Field {
  const choices = variants(api, schema);
  const types = new Set(choices.flatMap((one) => one.type ?? []));
  const values = choices.flatMap((one) => one.enum ?? []).filter((value) => typeof value === "string");
  return { name, kind: kindOf(types, values, choices), help: schema.description ?? "", range: rangeOf(schema, choices), values };
}

function variants(api: OpenApi, schema: Schema): Schema[] {
  const found = resolved(api, schema);
  return found.anyOf ? found.anyOf.flatMap((one) => variants(api, one)) : [found];
}

function kindOf(types: Set<string>, values: string[], choices: Schema[]): Kind {
  if (values.length > 0) return "choice";
  if (types.has("array")) {
    const isText = choices.some((one) => one.type === "array" && one.items?.type === "string");
    return isText ? "lines" : "json";
  }
  if (types.has("object")) return "json";
  if (types.has("number") || types.has("integer")) return "number";
  if (types.has("boolean")) return "boolean";
  return "text";
}

function rangeOf(schema: Schema, choices: Schema[]): string {
  const all = [schema, ...choices];
  const least = all.map((one) => one.minimum ?? one.exclusiveMinimum).find((value) => value !== undefined);
  const most = all.map((one) => one.maximum).find((value) => value !== undefined);
  const above = all.some((one) => one.exclusiveMinimum !== undefined) ? "above " : "";
  if (least === undefined && most === undefined) return "";
  const shown = (value: number) => String(Number(value.toPrecision(6)));
  if (most === undefined || most > 1e9) return above ? `above ${shown(least ?? 0)}` : `from ${shown(least ?? 0)}`;
  return least === undefined ? `up to ${shown(most)}` : `${above}${shown(least)} to ${shown(most)}`;
}

/**
 * The JSON value of what a person has entered; undefined for nothing. A text that is no number is sent as it is, and the
 * server says what is wrong with it. Throws SyntaxError for invalid JSON.
 */
export function valueOf(field: Field, text: string): unknown {
  if (text.trim() === "") return undefined;
  switch (field.kind) {
    case "number":
      return Number.isNaN(Number(text)) ? text : Number(text);
    case "boolean":
      return text === "true";
    case "lines":
      return text.split("\n").filter((line) => line !== "");
    case "json":
      return JSON.parse(text) as unknown;
    default:
      return text;
  }
}
