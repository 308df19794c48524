/** An answer that comes in pieces: text, tokens with log probabilities, tool calls, usage and timings. */

export interface Alternative {
  text: string;
  logprob: number;
}

export interface Token extends Alternative {
  /** The likeliest tokens at this position. */
  top: Alternative[];
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, complete at the end. */
  arguments: string;
}

export interface Sample {
  text: string;
  reasoning: string;
  tokens: Token[];
  toolCalls: ToolCall[];
  finish: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

export interface Timings {
  queue_ms: number;
  prompt_ms: number;
  predicted_ms: number;
  preemptions: number;
  restarts: number;
}

export interface Answer {
  id: string;
  samples: Sample[];
  usage: Usage | null;
  timings: Timings | null;
  /** This page's clock, in ms: the request, the first and the last piece with content. */
  askedMs: number;
  firstMs: number | null;
  lastMs: number | null;
}

interface Logprobs {
  content?: { token: string; logprob: number; top_logprobs: { token: string; logprob: number }[] }[] | null;
  tokens?: string[];
  token_logprobs?: (number | null)[];
  top_logprobs?: (Record<string, number> | null)[] | null;
}

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

/** A chunk of a chat or of a completion. */
export interface Chunk {
  id?: string;
  choices?: {
    index: number;
    text?: string;
    delta?: Delta;
    logprobs?: Logprobs | null;
    finish_reason?: string | null;
  }[];
  usage?: Usage | null;
  timings?: Timings | null;
  error?: { message?: string; param?: string | null };
}

const NO_SAMPLE: Sample = { text: "", reasoning: "", tokens: [], toolCalls: [], finish: "" };

export function asked(nowMs: number): Answer {
  return { id: "", samples: [], usage: null, timings: null, askedMs: nowMs, firstMs: null, lastMs: null };
}

/** The answer with one more chunk. */
export function extended(answer: Answer, chunk: Chunk, nowMs: number): Answer {
  const samples = [...answer.samples];
  let brings = false;
  for (const choice of chunk.choices ?? []) {
    while (samples.length <= choice.index) samples.push(NO_SAMPLE);
    const before = samples[choice.index] ?? NO_SAMPLE;
    const tokens = tokensOf(choice.logprobs ?? null);
    const text = choice.text ?? choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content ?? "";
    const calls = choice.delta?.tool_calls ?? [];
    brings ||= text !== "" || reasoning !== "" || tokens.length > 0 || calls.length > 0;
    samples[choice.index] = {
      text: before.text + text,
      reasoning: before.reasoning + reasoning,
      tokens: [...before.tokens, ...tokens],
      toolCalls: calls.reduce(withCall, before.toolCalls),
      finish: choice.finish_reason ?? before.finish,
    };
  }
  return {
    ...answer,
    id: chunk.id ?? answer.id,
    samples,
    usage: chunk.usage ?? answer.usage,
    timings: chunk.timings ?? answer.timings,
    firstMs: brings ? (answer.firstMs ?? nowMs) : answer.firstMs,
    lastMs: brings ? nowMs : answer.lastMs,
  };
}

function withCall(calls: ToolCall[], piece: NonNullable<Delta["tool_calls"]>[number]): ToolCall[] {
  const before = calls[piece.index] ?? { id: "", name: "", arguments: "" };
  const after = [...calls];
  after[piece.index] = {
    id: piece.id ?? before.id,
    name: before.name + (piece.function?.name ?? ""),
    arguments: before.arguments + (piece.function?.arguments ?? ""),
  };
  return after;
}

function tokensOf(logprobs: Logprobs | null): Token[] {
  if (logprobs?.content) {
    return logprobs.content.map((one) => ({
      text: one.token,
      logprob: one.logprob,
      top: one.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text,
    logprob: logprobs?.token_logprobs?.[index] ?? 0,
    top: Object.entries(logprobs?.top_logprobs?.[index] ?? {})
      .map(([other, logprob]) => ({ text: other, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/** Tokens per second after the first; null for fewer than two. */
export function tokensPerS(answer: Answer): number | null {
  const { usage, firstMs, lastMs } = answer;
  const num = usage?.completion_tokens ?? 0;
  if (firstMs === null || lastMs === null || num < 2 || lastMs <= firstMs) return null;
  return (1000 * (num - 1)) / (lastMs - firstMs);
}
