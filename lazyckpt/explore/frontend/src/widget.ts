// Requests over the messages of a notebook's widget.

import { ApiError, failure, requestKey, type Params, type Transport } from "./transport";

/** What anywidget gives: messages to and from Python. */
export interface WidgetModel {
  get(name: "height"): number;
  send(content: unknown, callbacks?: unknown, buffers?: ArrayBuffer[]): void;
  on(event: "msg:custom", callback: (content: Reply, buffers: DataView[]) => void): void;
  on(event: "change:height", callback: () => void): void;
  off(event: "change:height", callback: () => void): void;
  off(event: "msg:custom", callback: (content: Reply, buffers: DataView[]) => void): void;
}

interface Reply {
  id: number;
  status: number;
}

export class WidgetTransport implements Transport {
  readonly live = true;
  readonly holds = () => true;
  private last = 0;
  private readonly waiting = new Map<number, { resolve(body: ArrayBuffer): void; reject(error: Error): void }>();
  private readonly receive = (reply: Reply, buffers: DataView[]) => {
    const found = this.waiting.get(reply.id);
    if (!found) return;
    this.waiting.delete(reply.id);
    const view = buffers[0];
    const body = view ? (view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) as ArrayBuffer) : new ArrayBuffer(0);
    if (reply.status === 200) found.resolve(body);
    else found.reject(failure(reply.status, body));
  };

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.receive);
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
  }

  get(path: string, params: Params, signal?: AbortSignal): Promise<ArrayBuffer> {
    const id = (this.last += 1);
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        if (!this.waiting.delete(id)) return;
        this.model.send({ cancel: id });
        reject(new ApiError(499, "Cancelled", "cancelled"));
      });
      this.model.send({ id, request: requestKey(path, params) });
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
