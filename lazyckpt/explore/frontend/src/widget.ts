// Requests over the messages of a notebook's widget.

import { ApiError, failure, requestKey, Silence, type Params, type Transport } from "./transport";

/** What anywidget gives: messages to and from Python. */
export interface WidgetModel {
  get(name: "height"): number;
  get(name: "route"): string;
  set(name: "route", value: string): void;
  save_changes(): void;
  send(content: unknown, callbacks?: unknown, buffers?: ArrayBuffer[]): void;
  on(event: "msg:custom", callback: (content: Reply, buffers: DataView[]) => void): void;
  on(event: "change:height" | "comm_live_update", callback: () => void): void;
  off(event: "change:height" | "comm_live_update", callback: () => void): void;
  off(event: "msg:custom", callback: (content: Reply, buffers: DataView[]) => void): void;
}

interface Reply {
  id?: string;
  status?: number;
  pong?: string;
}

const PATIENCE = 4000; // milliseconds after which a kernel that says nothing is asked whether it is there

export class WidgetTransport implements Transport {
  readonly live = true;
  readonly holds = () => true;
  /** The views of a widget share its messages: each names its requests in its own way. */
  private readonly name = Math.random().toString(36).slice(2);
  private last = 0;
  private timer = 0;
  private readonly silence = new Silence();
  private readonly waiting = new Map<string, { resolve(body: ArrayBuffer): void; reject(error: Error): void }>();
  private readonly check = () => this.ask(PATIENCE / 4);
  private readonly receive = (reply: Reply, buffers: DataView[]) => {
    this.silence.tell(false);
    clearTimeout(this.timer);
    this.timer = 0;
    const found = reply.id === undefined ? undefined : this.waiting.get(reply.id);
    if (found) this.waiting.delete(reply.id!);
    if (this.waiting.size) this.wait();
    if (!found) return;
    const view = buffers[0];
    const body = view ? (view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) as ArrayBuffer) : new ArrayBuffer(0);
    if (reply.status === 200) found.resolve(body);
    else found.reject(failure(reply.status ?? 500, body));
  };

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.receive);
    model.on("comm_live_update", this.check);
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
    this.model.off("comm_live_update", this.check);
    clearTimeout(this.timer);
    for (const id of this.waiting.keys()) this.send({ cancel: id });
    this.waiting.clear();
    this.silence.close();
  }

  onSilence(changed: (silent: boolean) => void): () => void {
    return this.silence.listen(changed);
  }

  private send(message: unknown): boolean {
    try {
      this.model.send(message);
      return true;
    } catch {
      this.silence.tell(true); // the kernel has closed the channel
      return false;
    }
  }

  /** Asks the kernel whether it is there, once it has been silent for a while. */
  private wait(): void {
    if (!this.timer) this.timer = window.setTimeout(this.check, PATIENCE);
  }

  private ask(patience: number): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.silence.tell(true), patience);
    this.send({ ping: this.name });
  }

  get(path: string, params: Params, signal?: AbortSignal): Promise<ArrayBuffer> {
    const id = `${this.name}-${(this.last += 1)}`;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        if (!this.waiting.delete(id)) return;
        this.send({ cancel: id });
        reject(new ApiError(499, "Cancelled", "cancelled"));
      });
      if (this.send({ id, request: requestKey(path, params) })) this.wait();
    });
  }
}

/**
 * Keeps keys that are pressed in an element from the commands of JupyterLab, where "x" cuts the cell. JupyterLab looks
 * for this attribute at what has the focus first; at an element around it is too late.
 */
export function keepKeys(element: HTMLElement): void {
  element.addEventListener("focusin", ({ target }) => (target as Element).setAttribute("data-lm-suppress-shortcuts", "true"));
}
