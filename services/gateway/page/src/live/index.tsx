/** The live view. */

export function LiveView() {
  return <p class="muted">The live view is not built yet.</p>;
}
