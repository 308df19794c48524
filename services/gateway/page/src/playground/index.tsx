/** The playground: chat and completion with every sampling option. */

export function Playground() {
  return <p class="muted">The playground is not built yet.</p>;
}
