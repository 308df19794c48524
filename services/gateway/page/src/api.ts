/** The page's calls to the gateway: addresses relative to the page, the API key, and errors in one shape. */

const KEY = "paceline-key";
const keyListeners = new Set<() => void>();

/** A call that failed. `message`: the server's own sentence if it sent one. `status`: 0 without an answer, and 200 for an
 * error within a stream. */
export class ApiProblem extends Error {
  readonly status: number;
  /** The error's stable name. */
  readonly reason: string;
  /** The field of the request that it is about, such as "structured_outputs.regex". */
  readonly param: string;

  constructor(status: number, message: string, reason = "", param = "") {
    super(message);
    this.name = "ApiProblem";
    this.status = status;
    this.reason = reason;
    this.param = param;
  }

  /** Whether the page asks for another API key: it is missing or unknown, or is no admin key. */
  get needsKey(): boolean {
    return this.status === 401 || this.reason === "admin_required";
  }
}

/** The address of a path such as "v1/live". Without a leading slash: a proxy may serve the gateway below a prefix. */
export function apiUrl(path: string): string {
  return new URL(path, document.baseURI).href;
}

export function storedKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keep the key as long as this tab is open; "" forgets it. */
export function storeKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  for (const listener of keyListeners) listener();
}

/** Calls the listener after each change of the key. Returns a function that removes the listener. */
export function onKeyChange(listener: () => void): () => void {
  keyListeners.add(listener);
  return () => keyListeners.delete(listener);
}

/** fetch with the key. Returns the response for every status, so that the caller can read the body of an error. */
export function rawFetch(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const key = storedKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  return fetch(apiUrl(path), { ...init, headers });
}

/** fetch with the key. Throws ApiProblem for a status that is no success, TypeError without a connection. */
export async function apiFetch(path: string, init: RequestInit = {}): Promise<Response> {
  const response = await rawFetch(path, init);
  if (!response.ok) throw await problemOf(response);
  return response;
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await apiFetch(path, signal ? { signal } : {});
  return (await response.json()) as T;
}

export async function postJson<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const init: RequestInit = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  const response = await apiFetch(path, signal ? { ...init, signal } : init);
  return (await response.json()) as T;
}

export async function problemOf(response: Response): Promise<ApiProblem> {
  let message = `status ${response.status}`;
  let reason = "";
  let param = "";
  try {
    const body = (await response.json()) as { error?: Partial<Record<"message" | "reason" | "param", string | null>> };
    message = body.error?.message ?? message;
    reason = body.error?.reason ?? "";
    param = body.error?.param ?? "";
  } catch {
    // A proxy's answer is no JSON; the status says enough.
  }
  return new ApiProblem(response.status, message, reason, param);
}
