// How requests reach the API: over HTTP, over the channel of a widget, or from answers that a file holds.

import { percentEncoded } from "./percent";

export type Params = Record<string, string | number | undefined>;

export interface Transport {
  /** The bytes of the answer. Throws ApiError. */
  get(path: string, params: Params, signal?: AbortSignal): Promise<ArrayBuffer>;
  /** Whether every request can be answered; a report holds only some answers. */
  readonly live: boolean;
  /** Whether a request can be answered. */
  holds(path: string, params: Params): boolean;
  /** Calls `changed` when the server or kernel stops to answer, and when it answers again. Returns a function that ends the calls. */
  onSilence?(changed: (silent: boolean) => void): () => void;
}

/** Listeners that are told whether requests are answered. */
export class Silence {
  private readonly listeners = new Set<(silent: boolean) => void>();

  listen(changed: (silent: boolean) => void): () => void {
    this.listeners.add(changed);
    return () => this.listeners.delete(changed);
  }

  tell(silent: boolean): void {
    this.listeners.forEach((listener) => listener(silent));
  }

  close(): void {
    this.listeners.clear();
  }
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly kind: string,
    message: string,
  ) {
    super(message);
  }
}

/** Whether a parameter says anything. The name of a tensor may be empty; no other text may. */
export function isGiven(name: string, value: string | number | undefined): boolean {
  return value !== undefined && (value !== "" || name === "name");
}

/** A request as one text: parameters in the order of their names, without those that say nothing. */
export function requestKey(path: string, params: Params): string {
  const given = Object.entries(params).filter(([name, value]) => isGiven(name, value));
  given.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  const text = given.map(([name, value]) => `${percentEncoded(name)}=${percentEncoded(String(value))}`);
  return text.length ? `${path}?${text.join("&")}` : path;
}

export function failure(status: number, body: ArrayBuffer): ApiError {
  try {
    const { error } = JSON.parse(new TextDecoder().decode(body)) as { error: { kind: string; message: string } };
    return new ApiError(status, error.kind, error.message);
  } catch {
    const text = new TextDecoder().decode(body).trim();
    const plain = text && text.length < 1000 && !text.startsWith("<");
    return new ApiError(status, "HttpError", plain ? text : `The server answered with status ${status}.`);
  }
}

const FIRST_PAUSE = 500, LONGEST_PAUSE = 2000; // milliseconds between tries to reach a server
const AWAY = [502, 503, 504]; // what a proxy says for a server that does not answer

export class HttpTransport implements Transport {
  readonly live = true;
  readonly holds = () => true;
  private readonly silence = new Silence();

  constructor(
    private readonly base: string,
    private readonly token: string,
  ) {}

  async get(path: string, params: Params, signal?: AbortSignal): Promise<ArrayBuffer> {
    for (let pause = FIRST_PAUSE; ; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
      const found = await this.answer(`${this.base}/${requestKey(path, params)}`, signal);
      this.silence.tell(!found);
      if (found && !found.ok) throw failure(found.status, found.body);
      if (found) return found.body;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  onSilence(changed: (silent: boolean) => void): () => void {
    return this.silence.listen(changed);
  }

  /** The answer of the server; undefined if the server cannot be reached. */
  private async answer(url: string, signal: AbortSignal | undefined): Promise<{ ok: boolean; status: number; body: ArrayBuffer } | undefined> {
    const headers: Record<string, string> = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    try {
      const response = await fetch(url, { headers, signal: signal ?? null });
      const body = await response.arrayBuffer();
      return AWAY.includes(response.status) ? undefined : { ok: response.ok, status: response.status, body };
    } catch (error) {
      if (signal?.aborted) throw error;
      return undefined;
    }
  }
}

/** What a report has of a checkpoint. */
export interface Report {
  /** Request -> gzipped body, as base64. */
  answers: Record<string, string>;
  /** Request -> status, kind and message, of answers that are errors. */
  failures?: Record<string, [number, string, string]>;
  /** Request -> the request whose answer it has, too: that of another name of a tied tensor. */
  same?: Record<string, string>;
  report?: LeftOut;
}

/** What a report has left out, and how to see it. */
export interface LeftOut {
  /** What it is called; how many the report holds; how many there are, or 0; why not all. */
  left: [string, number, number, "size" | "read"][];
  /** The limits of the file's size, and of how much was read. */
  size: string;
  read: string;
  /** Commands that show everything, and that write a larger report. */
  serve: string;
  larger: string;
}

/** Answers that a report holds. */
export class FileTransport implements Transport {
  readonly live = false;

  constructor(private readonly held: Report) {}

  get report(): LeftOut | undefined {
    return this.held.report;
  }

  private keyOf(path: string, params: Params): string {
    const key = requestKey(path, params);
    return (this.held.same && Object.hasOwn(this.held.same, key) && this.held.same[key]) || key;
  }

  holds(path: string, params: Params): boolean {
    return Object.hasOwn(this.held.answers, this.keyOf(path, params));
  }

  async get(path: string, params: Params): Promise<ArrayBuffer> {
    const key = this.keyOf(path, params);
    const found = Object.hasOwn(this.held.answers, key) ? this.held.answers[key] : undefined;
    const failed = this.held.failures && Object.hasOwn(this.held.failures, key) ? this.held.failures[key] : undefined;
    if (failed) throw new ApiError(...failed);
    if (found === undefined) {
      throw new ApiError(404, "NotInReport", "This report does not hold these values. `lazyckpt serve` shows them all.");
    }
    const packed = Uint8Array.from(atob(found), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }
}
