/** Runs a mix under a preset. */

import { ApiProblem, apiFetch, getJson, postJson } from "../api.ts";
import { eventsOf } from "../live/sse.ts";
import type { PoliciesAnswer } from "../types.ts";
import type { Chunk } from "./answer.ts";
import { partBody, type Part, type Run, type Timing } from "./mix.ts";

/**
 * One run for each preset, in turn. The policies that were in force before are restored at the end, whatever happens.
 * Throws ApiProblem, and AbortError when it is stopped.
 */
export async function compare(
  presets: string[],
  mix: Part[],
  signal: AbortSignal,
  onStep: (text: string) => void,
): Promise<Run[]> {
  const before = await getJson<PoliciesAnswer>("v1/policies", signal);
  const runs: Run[] = [];
  // Before the policies change: one small request of each part shows whether the server refuses its tenant or the key.
  for (const part of mix) await runPart({ ...part, count: 1, times: 1, maxTokens: 1 }, 0, "probe", signal);
  try {
    for (const preset of presets) {
      onStep(`runs the mix under ${preset}…`);
      await postJson("v1/policies", { preset }, signal);
      runs.push(await runMix(preset, mix, signal));
    }
  } finally {
    onStep("restores the policies…");
    // Without the signal: a stopped comparison restores them, too.
    await patiently(() => postJson("v1/policies", restored(before)));
  }
  return runs;
}

/** Tries again for half a minute: a scheduler that restarts answers again. */
async function patiently(call: () => Promise<unknown>): Promise<void> {
  for (let triesLeft = 30; ; triesLeft--) {
    try {
      await call();
      return;
    } catch (error) {
      const isFinal = error instanceof ApiProblem && error.status < 500;
      if (isFinal || triesLeft === 0) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

/** The body that brings policies back. */
export function restored({ preset, policies, options }: PoliciesAnswer): Record<string, unknown> {
  return preset ? { preset, options } : { ...policies, options };
}

async function runMix(preset: string, mix: Part[], signal: AbortSignal): Promise<Run> {
  const salt = `playground-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const startMs = performance.now();
  const failed = new AbortController();
  const either = AbortSignal.any([signal, failed.signal]);
  try {
    const parts = mix.map(async (part, index) => {
      await delay(1000 * part.afterS, either);
      return runPart(part, index, salt, either);
    });
    const timings = (await Promise.all(parts)).flat();
    const numTokens = mix.reduce((sum, part) => sum + part.count * part.maxTokens, 0);
    return { preset, timings, durationS: (performance.now() - startMs) / 1000, numTokens };
  } catch (error) {
    failed.abort();
    throw error;
  }
}

async function runPart(part: Part, index: number, salt: string, signal: AbortSignal): Promise<Timing[]> {
  const sentMs = performance.now();
  const first: number[] = [];
  const last: number[] = [];
  const response = await apiFetch("v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(partBody(part, salt)),
    signal,
  });
  if (!response.body) throw new TypeError("the answer has no body");
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new ApiProblem(200, chunk.error.message ?? "the stream ended");
    const nowMs = performance.now();
    for (const choice of chunk.choices ?? []) {
      first[choice.index] ??= nowMs;
      last[choice.index] = nowMs;
    }
  }
  return Array.from({ length: part.count }, (_, request) => {
    const [firstMs, lastMs] = [first[request] ?? NaN, last[request] ?? NaN];
    return {
      part: index,
      ttftS: (firstMs - sentMs) / 1000,
      tokenS: part.maxTokens > 1 ? (lastMs - firstMs) / 1000 / (part.maxTokens - 1) : 0,
      e2eS: (lastMs - sentMs) / 1000,
    };
  });
}

function delay(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}
