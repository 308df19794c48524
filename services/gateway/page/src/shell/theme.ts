/** Dark or light: the system's choice, until the user chooses. The browser keeps the user's choice. */

import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";

const NAME = "paceline-theme";

/** The theme that is shown now, dark or light, for code that draws on a canvas. */
export function useShownTheme(): string {
  const root = document.documentElement;
  const [shown, setShown] = useState(root.dataset["theme"] ?? "");
  useEffect(() => {
    const observer = new MutationObserver(() => setShown(root.dataset["theme"] ?? ""));
    observer.observe(root, { attributeFilter: ["data-theme"] });
    return () => observer.disconnect();
  }, []);
  return shown;
}

export function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(() => {
    const kept = localStorage.getItem(NAME);
    return kept === "light" || kept === "dark" ? kept : "system";
  });
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const apply = () => {
      const isDark = theme === "system" ? dark.matches : theme === "dark";
      document.documentElement.dataset["theme"] = isDark ? "dark" : "light";
    };
    apply();
    if (theme === "system") localStorage.removeItem(NAME);
    else localStorage.setItem(NAME, theme);
    dark.addEventListener("change", apply);
    return () => dark.removeEventListener("change", apply);
  }, [theme]);
  return [theme, setTheme];
}
