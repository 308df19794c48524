/** A request's life. */

export function RequestLife({ id }: { id: string }) {
  return <p class="muted">The life of {id || "a request"} is not built yet.</p>;
}
