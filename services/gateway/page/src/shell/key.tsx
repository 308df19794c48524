/** The form that asks for an API key. The key stays in this tab's session storage, and is sent to the gateway only. */

import { useState } from "preact/hooks";
import { storedKey, storeKey } from "../api.ts";

export function KeyForm({ why, onDone }: { why: string; onDone?: () => void }) {
  const [key, setKey] = useState("");
  const hasKey = storedKey() !== "";
  const submit = (event: Event) => {
    event.preventDefault();
    if (!key.trim()) return;
    storeKey(key.trim());
    setKey("");
    onDone?.();
  };
  return (
    <form class="card key-form" onSubmit={submit}>
      <h2>API key</h2>
      <p role="alert">{why}</p>
      <label class="field">
        Key
        <input
          type="password"
          name="api-key"
          autocomplete="off"
          spellcheck={false}
          value={key}
          onInput={(event) => setKey(event.currentTarget.value)}
        />
      </label>
      <div class="row">
        <button class="primary" type="submit" disabled={!key.trim()}>
          Use this key
        </button>
        {hasKey && (
          <button
            type="button"
            onClick={() => {
              storeKey("");
              onDone?.();
            }}
          >
            Forget the stored key
          </button>
        )}
      </div>
      <p class="muted">It is kept until this tab is closed.</p>
    </form>
  );
}
