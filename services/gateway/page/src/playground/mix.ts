/** A mix of requests that two presets get in turn, and the figures of a run. */

/** Requests that arrive together. */
export interface Part {
  count: number;
  prompt: string;
  /** How often the prompt's text stands in a prompt. */
  times: number;
  maxTokens: number;
  tenant: string;
  /** Seconds after the start. */
  afterS: number;
}

/** How one request went, in seconds. */
export interface Timing {
  part: number;
  ttftS: number;
  /** The mean time of a token after the first. */
  tokenS: number;
  e2eS: number;
}

export interface Run {
  preset: string;
  timings: Timing[];
  /** From the first request to the last token. */
  durationS: number;
  numTokens: number;
}

/**
 * A flood of long prompts of one tenant, and short questions of another one that come into it. A browser opens six
 * connections to a server, so each part is one HTTP request with several prompts, and there are at most MOST_PARTS.
 */
export const DEFAULT_MIX: Part[] = [
  { count: 24, prompt: "The old king walked to the river.", times: 110, maxTokens: 32, tenant: "flood", afterS: 0 },
  { count: 8, prompt: "Once there was a fox", times: 1, maxTokens: 32, tenant: "questions", afterS: 0.3 },
];
export const MOST_PARTS = 4;
export const MOST_REQUESTS = 256;

/**
 * The body of a part. `salt`: keeps a run from finding the prefixes that the one before has left in the cache. The
 * prompts differ at their beginning, so that they share nothing.
 */
export function partBody(part: Part, salt: string): Record<string, unknown> {
  const text = Array.from({ length: part.times }, () => part.prompt).join(" ");
  const body = {
    prompt: Array.from({ length: part.count }, (_, index) => `${index}. ${text}`),
    max_tokens: part.maxTokens,
    ignore_eos: true,
    temperature: 0,
    stream: true,
    cache_salt: salt,
  };
  return part.tenant ? { ...body, tenant: part.tenant } : body;
}

/** What is wrong with a mix; "" if it can run. */
export function mixProblem(mix: Part[]): string {
  if (mix.length === 0) return "The mix has no requests.";
  for (const [index, part] of mix.entries()) {
    const numbers = [part.count, part.times, part.maxTokens];
    if (numbers.some((value) => !Number.isInteger(value) || value < 1) || !(part.afterS >= 0)) {
      return `Part ${index + 1}: requests, times and output tokens must be whole numbers of at least 1; the start must be at least 0 s.`;
    }
    if (!part.prompt.trim()) return `Part ${index + 1} has no prompt.`;
  }
  const all = mix.reduce((sum, part) => sum + part.count, 0);
  return all > MOST_REQUESTS ? `The mix has ${all} requests; at most ${MOST_REQUESTS} run at once.` : "";
}

/** The value that this share of the values does not exceed; null without values. */
export function quantile(values: number[], q: number): number | null {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)] ?? null;
}

export interface Row {
  label: string;
  ttft: (number | null)[];
  token: (number | null)[];
  e2e: (number | null)[];
}

/** p50 and p99 of each part. */
export function rowsOf(run: Run, mix: Part[]): Row[] {
  return mix.map((part, index) => {
    const timings = run.timings.filter((one) => one.part === index);
    const both = (values: number[]) => [quantile(values, 0.5), quantile(values, 0.99)];
    return {
      label: part.tenant || `part ${index + 1}`,
      ttft: both(timings.map((one) => one.ttftS)),
      token: both(timings.map((one) => one.tokenS)),
      e2e: both(timings.map((one) => one.e2eS)),
    };
  });
}
