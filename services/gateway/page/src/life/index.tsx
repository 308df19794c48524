/** A request's life: why it waited, what it waited for, what happened to it. */

import { useEffect, useState } from "preact/hooks";
import { ApiProblem, getJson, onKeyChange } from "../api.ts";
import { count } from "../format.ts";
import "../style/life.css";
import { Requests } from "../live/requests.tsx";
import { useLive } from "../live/source.ts";
import { KeyForm } from "../shell/key.tsx";
import { requestHref } from "../shell/route.ts";
import type { TimelineAnswer } from "../types.ts";
import { Sequence } from "./sequence.tsx";
import { hasEnded, lastS } from "./timeline.ts";

const AGAIN_MS = 1000;

interface Found {
  answer: TimelineAnswer | null;
  problem: ApiProblem | null;
  /** performance.now() when the answer came. */
  atMs: number;
}

const NOTHING: Found = { answer: null, problem: null, atMs: 0 };

export function RequestLife({ id }: { id: string }) {
  const live = useLive();
  const { answer, problem, atMs } = useTimeline(id);
  useEffect(() => {
    document.title = id ? `Paceline: ${id}` : "Paceline: a request";
  }, [id]);
  const scheduler = live.snapshot?.scheduler;
  const isSame = answer?.id === id;
  return (
    <div class="life-view">
      <h2 class="visually-hidden">A request's life</h2>
      <Ask id={id} />
      {problem && !problem.needsKey && <p class="notice bad">{problem.message}</p>}
      {problem?.needsKey && <KeyForm why={problem.message} />}
      {isSame && answer.sequences.length < answer.num_sequences && (
        <p class="notice">
          {answer.sequences.length} of {count(answer.num_sequences)} sequences are shown.
        </p>
      )}
      {isSame &&
        answer.sequences.map((sequence) => {
          const seen = lastS(sequence.spans);
          const nowS = hasEnded(sequence.spans) ? null : seen + (performance.now() - atMs) / 1000;
          return <Sequence key={sequence.request_id} sequence={sequence} nowS={nowS} />;
        })}
      {scheduler && <Requests view={scheduler} />}
      {live.problem?.needsKey && !problem && (
        <p class="notice">A list of recent requests needs an admin key; with another key, enter an id above.</p>
      )}
    </div>
  );
}

function Ask({ id }: { id: string }) {
  const [text, setText] = useState(id);
  useEffect(() => setText(id), [id]);
  const submit = (event: Event) => {
    event.preventDefault();
    if (text.trim()) location.hash = requestHref(text.trim());
  };
  return (
    <form class="card row ask" onSubmit={submit}>
      <label class="field">
        Id of the answer (cmpl-…, chatcmpl-…) or X-Request-ID
        <input
          type="text"
          name="request-id"
          spellcheck={false}
          autocomplete="off"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
      </label>
      <button class="primary" type="submit" disabled={!text.trim()}>
        Show
      </button>
    </form>
  );
}

/** The timeline of a request, asked again while it lives and the tab is visible. */
function useTimeline(id: string): Found {
  const [found, setFound] = useState<Found>(NOTHING);
  const [asked, setAsked] = useState(0);
  useEffect(() => onKeyChange(() => setAsked((before) => before + 1)), []);
  useEffect(() => {
    setFound(NOTHING);
    if (!id) return;
    const leaving = new AbortController();
    let timer = 0;
    const ask = async () => {
      if (document.hidden) {
        timer = window.setTimeout(ask, AGAIN_MS);
        return;
      }
      let again = true;
      try {
        const answer = await getJson<TimelineAnswer>(
          `v1/requests/${encodeURIComponent(id)}/timeline`,
          leaving.signal,
        );
        setFound({ answer, problem: null, atMs: performance.now() });
        again = !answer.sequences.every((sequence) => hasEnded(sequence.spans));
      } catch (error) {
        if (leaving.signal.aborted) return;
        const problem = error instanceof ApiProblem ? error : new ApiProblem(0, "The gateway does not answer.");
        setFound((before) => ({ ...before, problem }));
        again = problem.status === 0 || problem.status >= 500;
      }
      if (again && !leaving.signal.aborted) timer = window.setTimeout(ask, AGAIN_MS);
    };
    void ask();
    return () => {
      leaving.abort();
      clearTimeout(timer);
    };
  }, [id, asked]);
  return found;
}
