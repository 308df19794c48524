/** The playground: chat, completion, and two presets beside each other. */

import { useEffect, useState } from "preact/hooks";
import { ApiProblem, getJson, onKeyChange } from "../api.ts";
import { KeyForm } from "../shell/key.tsx";
import "../style/playground.css";
import { Chat } from "./chat.tsx";
import { Completion } from "./completion.tsx";
import type { OpenApi } from "./fields.ts";
import { PresetComparison } from "./presets.tsx";

const TABS = ["Chat", "Completion", "Two presets"] as const;
type Tab = (typeof TABS)[number];

export function Playground() {
  const [tab, setTab] = useState<Tab>("Chat");
  const { api, problem } = useOpenApi();
  if (problem?.needsKey) return <KeyForm why={problem.message} />;
  if (problem) return <p class="notice bad">{problem.message}</p>;
  if (!api) return <p class="muted">loads the options…</p>;
  return (
    <div class="stack">
      <h2 class="visually-hidden">Playground</h2>
      <div class="row" role="group" aria-label="Kinds of request">
        {TABS.map((name) => (
          <button key={name} type="button" aria-pressed={tab === name} onClick={() => setTab(name)}>
            {name}
          </button>
        ))}
      </div>
      {/* All stay mounted: a chat survives a look at the others. */}
      <div hidden={tab !== "Chat"}>
        <Chat api={api} />
      </div>
      <div hidden={tab !== "Completion"}>
        <Completion api={api} />
      </div>
      <div hidden={tab !== "Two presets"}>
        <PresetComparison isShown={tab === "Two presets"} />
      </div>
    </div>
  );
}

/** The server's own description, fetched once, and again with another key. */
function useOpenApi(): { api: OpenApi | null; problem: ApiProblem | null } {
  const [api, setApi] = useState<OpenApi | null>(null);
  const [problem, setProblem] = useState<ApiProblem | null>(null);
  useEffect(() => {
    const load = () =>
      getJson<OpenApi>("openapi.json").then(
        (found) => {
          setApi(found);
          setProblem(null);
        },
        (error: unknown) =>
          setProblem(error instanceof ApiProblem ? error : new ApiProblem(0, "The gateway does not answer.")),
      );
    void load();
    return onKeyChange(() => void load());
  }, []);
  return { api, problem };
}
