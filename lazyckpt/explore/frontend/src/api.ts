// Requests with typed answers, and arrays out of packed ones.

import type { Params, Transport } from "./transport";

export interface Problem {
  code: string;
  severity: "error" | "warning" | "note";
  text: string;
  advice: string;
}

export interface Side {
  root: string;
  /** The file of a checkpoint of one file, else its folder. */
  place: string;
  format: string;
  mesh: { tp: number; pp: number; dp: number; ep: number };
  state: string;
  states: { name: string; tensors: number; numel: number; nbytes: number }[];
  numel: number;
  nbytes: number;
  tensors: number;
  files: number;
  /** Whether names speak of experts. */
  experts: boolean;
  file_bytes: number;
  facts: [string, string][];
  problems: Problem[];
  problems_in_all: number;
}

export interface About {
  api: number;
  kind: "checkpoint" | "comparison" | "run";
  title: string;
  steps: number[];
  sides: Side[];
}

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int32: Int32Array,
  uint32: Uint32Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
} as const;

export type Numbers = InstanceType<(typeof ARRAYS)[keyof typeof ARRAYS]>;

/** Arrays with a header, as `lazyckpt.explore.packing.pack` packs them. */
export function unpack<H>(body: ArrayBuffer): { header: H; arrays: Record<string, Numbers> } {
  const length = new DataView(body).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, length))) as H & {
    arrays: { name: string; dtype: keyof typeof ARRAYS; shape: number[]; offset: number }[];
  };
  const arrays: Record<string, Numbers> = {};
  for (const { name, dtype, shape, offset } of header.arrays) {
    const count = shape.reduce((a, b) => a * b, 1);
    arrays[name] = new ARRAYS[dtype](body, 4 + length + offset, count);
  }
  return { header, arrays };
}

export class Api {
  constructor(readonly transport: Transport) {}

  get live(): boolean {
    return this.transport.live;
  }

  /** Whether a request can be answered: a report holds only some answers. */
  holds(path: string, params: Params): boolean {
    return this.transport.holds(path, params);
  }

  async json<T>(path: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
    const body = await this.transport.get(path, params, signal);
    return JSON.parse(new TextDecoder().decode(body)) as T;
  }

  async packed<H>(path: string, params: Params, signal?: AbortSignal) {
    return unpack<H>(await this.transport.get(path, params, signal));
  }
}
