import { useEffect, useState } from "preact/hooks";
import { onKeyChange, storedKey, storeKey } from "../api.ts";
import iconUrl from "../icon.svg";
import { RequestLife } from "../life/index.tsx";
import { LiveView } from "../live/index.tsx";
import { Playground } from "../playground/index.tsx";
import { useRoute, type View } from "./route.ts";
import { useTheme, type Theme } from "./theme.ts";

const TABS: [View, string][] = [
  ["live", "Live"],
  ["request", "Request"],
  ["playground", "Playground"],
];
const THEMES: [Theme, string][] = [
  ["system", "◐ auto"],
  ["light", "☀ light"],
  ["dark", "☾ dark"],
];

export function App() {
  const route = useRoute();
  const [theme, setTheme] = useTheme();
  const [hasPlayed, setHasPlayed] = useState(false);
  useEffect(() => setHasPlayed((before) => before || route.view === "playground"), [route.view]);
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <header class="top">
        <h1 class="brand">
          <img src={iconUrl} alt="" />
          <span>Paceline</span>
        </h1>
        <nav class="tabs" aria-label="Views">
          {TABS.map(([view, label]) => (
            <a key={view} href={`#/${view}`} aria-current={route.view === view ? "page" : undefined}>
              {label}
            </a>
          ))}
        </nav>
        <div class="row end">
          <ForgetKey />
          <select
            aria-label="Colours"
            value={theme}
            onChange={(event) => setTheme(event.currentTarget.value as Theme)}
          >
            {THEMES.map(([name, label]) => (
              <option key={name} value={name}>
                {label}
              </option>
            ))}
          </select>
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        {route.view === "live" && <LiveView />}
        {route.view === "request" && <RequestLife id={route.id} />}
        {/* Stays mounted, so that a running answer survives a look at the live view. */}
        {hasPlayed && (
          <div hidden={route.view !== "playground"}>
            <Playground />
          </div>
        )}
      </main>
    </>
  );
}

/** A way to forget the key that this tab has stored. */
function ForgetKey() {
  const [hasKey, setHasKey] = useState(storedKey() !== "");
  useEffect(() => onKeyChange(() => setHasKey(storedKey() !== "")), []);
  return hasKey ? (
    <button type="button" onClick={() => storeKey("")}>
      Forget key
    </button>
  ) : null;
}

/** The part after "#" is the route, so the link must not change it. */
function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}
