/** Server-sent events from a fetch stream. EventSource cannot send a key. */

/** Feed it text as it comes; it returns the data of the events that are complete. */
export class EventParser {
  private rest = "";

  feed(text: string): string[] {
    const events = (this.rest + text).split(/\r?\n\r?\n/);
    this.rest = events.pop() ?? "";
    return events.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(event: string): string {
  return event
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).replace(/^ /, ""))
    .join("\n");
}

/** The data of each event of a stream, until it ends. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const parser = new EventParser();
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
