/** Which view the address names: the part after "#", so that the server has one page only. */

import { useEffect, useState } from "preact/hooks";

export type View = "live" | "request" | "playground";

export interface Route {
  view: View;
  /** The request's id in "request". */
  id: string;
}

export function parseRoute(hash: string): Route {
  const [view = "", id = ""] = hash.replace(/^#\/?/, "").split("/", 2);
  if (view === "request") return { view, id: decoded(id) };
  return { view: view === "playground" ? "playground" : "live", id: "" };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function requestHref(id: string): string {
  return `#/request/${encodeURIComponent(id)}`;
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const change = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return route;
}
