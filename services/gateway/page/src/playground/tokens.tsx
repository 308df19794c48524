/** Tokens with their log probabilities: the darker, the less likely. A pointed or focused one shows its alternatives. */

import { useRef, useState } from "preact/hooks";
import type { Alternative, Token } from "./answer.ts";

const TIP_WIDTH = 240;

interface Shown {
  index: number;
  left: number;
  top: number;
}

export function Tokens({ tokens }: { tokens: Token[] }) {
  const box = useRef<HTMLDivElement>(null);
  const [shown, setShown] = useState<Shown | null>(null);
  const [current, setCurrent] = useState(0); // the one that Tab reaches
  const show = (element: EventTarget | null) => {
    if (!(element instanceof HTMLElement) || element.dataset["index"] === undefined || !box.current) return;
    const line = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const area = box.current.getBoundingClientRect();
    const most = Math.max(0, area.width - TIP_WIDTH);
    const index = Number(element.dataset["index"]);
    setShown({ index, left: Math.min(Math.max(0, line.left - area.left), most), top: line.bottom - area.top + 4 });
  };
  const move = (event: KeyboardEvent) => {
    if (event.key === "Escape") setShown(null);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.min(Math.max(current + step, 0), tokens.length - 1);
    setCurrent(next);
    box.current?.querySelector<HTMLElement>(`[data-index="${next}"]`)?.focus();
  };
  const token = shown && tokens[shown.index];
  return (
    <div
      ref={box}
      class="tokens"
      role="group"
      aria-label="Tokens; the arrow keys go from one to the next"
      onKeyDown={move}
      onMouseOver={(event) => show(event.target)}
      onMouseLeave={() => setShown(null)}
      onFocusIn={(event) => show(event.target)}
      onFocusOut={() => setShown(null)}
    >
      {tokens.map((one, index) => (
        <span
          key={index}
          class="token"
          data-index={index}
          tabIndex={index === Math.min(current, tokens.length - 1) ? 0 : -1}
          style={{ "--doubt": String(doubt(one.logprob)) }}
          aria-describedby={shown?.index === index ? "token-tip" : undefined}
          onFocus={() => setCurrent(index)}
        >
          {one.text}
        </span>
      ))}
      {token && (
        <div id="token-tip" role="tooltip" class="token-tip" style={{ left: shown.left, top: shown.top, width: TIP_WIDTH }}>
          <Row one={token} isTaken />
          {token.top
            .filter((one) => one.text !== token.text)
            .map((one) => (
              <Row key={one.text} one={one} />
            ))}
        </div>
      )}
    </div>
  );
}

/** 0 for a token with probability 1, and 1 for a probability of 1 % or less. */
function doubt(logprob: number): number {
  return Math.min(1, -logprob / Math.log(100));
}

function Row({ one, isTaken = false }: { one: Alternative; isTaken?: boolean }) {
  const probability = Math.exp(one.logprob);
  return (
    <p class={isTaken ? "taken" : ""}>
      <code>{JSON.stringify(one.text)}</code>
      <span class="num">
        {one.logprob.toFixed(3)} <span class="muted">{percent(probability)}</span>
      </span>
      <i style={{ width: `${100 * probability}%` }} />
    </p>
  );
}

/** 12.3 %; "<0.1 %" for a smaller probability above 0. */
export function percent(probability: number): string {
  const value = 100 * probability;
  if (value > 0 && value < 0.1) return "<0.1 %";
  return `${value.toFixed(1)} %`;
}
