/** A request with an answer that comes in pieces. The request can be stopped. */

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiProblem, apiFetch } from "../api.ts";
import { eventsOf } from "../live/sse.ts";
import { asked, extended, type Answer, type Chunk } from "./answer.ts";

/** The whole answer. `onPiece` gets the answer so far after each piece. Throws ApiProblem; AbortError if stopped. */
export async function stream(
  path: string,
  body: Record<string, unknown>,
  signal: AbortSignal,
  onPiece: (answer: Answer) => void = () => undefined,
): Promise<Answer> {
  let answer = asked(performance.now());
  const headers = { "Content-Type": "application/json" };
  const response = await apiFetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.body) throw new TypeError("the answer has no body");
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new ApiProblem(200, chunk.error.message ?? "the stream ended", "", chunk.error.param ?? "");
    answer = extended(answer, chunk, performance.now());
    onPiece(answer);
  }
  return answer;
}

export interface Asking {
  /** The answer so far; null before the first request. */
  answer: Answer | null;
  running: boolean;
  problem: { message: string; param: string; needsKey: boolean } | null;
  /** Sends a request; the answer is null if it failed or was stopped before a piece. */
  ask: (path: string, makeBody: () => Record<string, unknown>) => Promise<Answer | null>;
  stop: () => void;
  clear: () => void;
}

/** One request at a time. What comes is drawn at most once a frame. */
export function useAsking(): Asking {
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [problem, setProblem] = useState<Asking["problem"]>(null);
  const [running, setRunning] = useState(false);
  const leaving = useRef<AbortController | null>(null);
  useEffect(() => () => leaving.current?.abort(), []);

  const ask: Asking["ask"] = async (path, makeBody) => {
    const controller = (leaving.current = new AbortController());
    let latest: Answer | null = null;
    let frame = 0;
    const draw = (piece: Answer) => {
      latest = piece;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        setAnswer(latest);
      });
    };
    setProblem(null);
    setAnswer(null);
    setRunning(true);
    try {
      latest = await stream(path, makeBody(), controller.signal, draw);
    } catch (error) {
      if (!controller.signal.aborted) setProblem(described(error));
    } finally {
      cancelAnimationFrame(frame);
      setAnswer(latest);
      setRunning(false);
    }
    return latest;
  };
  const stop = () => leaving.current?.abort();
  const clear = () => {
    stop();
    setAnswer(null);
    setProblem(null);
  };
  return { answer, running, problem, ask, stop, clear };
}

function described(error: unknown): NonNullable<Asking["problem"]> {
  const message = error instanceof TypeError ? "The gateway does not answer." : String((error as Error).message);
  const param = (error as { param?: string }).param ?? "";
  return { message, param, needsKey: error instanceof ApiProblem && error.needsKey };
}
