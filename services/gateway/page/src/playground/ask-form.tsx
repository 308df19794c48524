/** The box to write in, with send and stop. Ctrl+Enter sends, Escape stops. */

import { useEffect, useRef } from "preact/hooks";

interface Props {
  label: string;
  text: string;
  rows: number;
  running: boolean;
  send: string;
  onInput: (text: string) => void;
  onSend: () => void;
  onStop: () => void;
}

export function AskForm({ label, text, rows, running, send, onInput, onSend, onStop }: Props) {
  const box = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    const stop = (event: KeyboardEvent) => event.key === "Escape" && running && onStop();
    addEventListener("keydown", stop);
    return () => removeEventListener("keydown", stop);
  }, [running, onStop]);
  return (
    <form
      class="ask-form"
      onSubmit={(event) => {
        event.preventDefault();
        onSend();
      }}
    >
      <label class="field">
        {label}
        <textarea
          ref={box}
          rows={rows}
          value={text}
          onInput={({ currentTarget }) => onInput(currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
            event.preventDefault();
            if (!running) onSend();
          }}
        />
      </label>
      <div class="row">
        <button class="primary" type="submit" disabled={running}>
          {send}
        </button>
        <button type="button" onClick={onStop} disabled={!running}>
          Stop
        </button>
        <small class="muted">Ctrl+Enter sends, Escape stops</small>
      </div>
    </form>
  );
}
