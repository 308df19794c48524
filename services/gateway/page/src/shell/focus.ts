/** A key handler that moves the focus among the elements of a list with the up and down arrow keys, Home and End. */
export function moveFocus(selector: string): (event: KeyboardEvent) => void {
  return (event) => {
    if (!(event.currentTarget instanceof Element) || !(event.target instanceof Element)) return;
    const all = [...event.currentTarget.querySelectorAll<HTMLElement>(selector)];
    const at = all.indexOf(event.target.closest<HTMLElement>(selector) ?? document.body);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    all[Math.min(Math.max(next, 0), all.length - 1)]?.focus();
  };
}
