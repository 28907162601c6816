// What the tree shows of a state: names, shapes and dtypes, marks, and norms once they are computed.

import type { Api, Numbers } from "../api";
import { requestKey, type Params } from "../transport";
import { Names } from "./names";

export interface Kind {
  shape: number[];
  dtype: string;
  itemsize: number;
}

interface Header {
  count: number;
  kinds: Kind[];
  tied: Record<string, string>;
  twice: number[];
  odd: Record<string, string>;
  unreadable: [string, string][];
}

/** Marks of a tensor, as bits. */
export const TIED = 1, IDLE = 2, LOST = 4, PROBLEM = 8;

/** The tensors of a state, by the numbers of their sorted names. */
export class State {
  readonly names: Names;
  readonly kinds: Kind[];
  readonly kind: Numbers;
  readonly tied: ReadonlyMap<number, string>;
  readonly twice: ReadonlySet<number>;
  readonly unreadable: [string, string][];
  private readonly numels: Float64Array;
  private readonly sizes: Float64Array;

  constructor({ header, arrays }: { header: Header; arrays: Record<string, Numbers> }) {
    const utf8 = arrays["text"] as Uint8Array;
    this.names = new Names(new TextDecoder("utf-8", { ignoreBOM: true }).decode(utf8), header.count, numbered(header.odd), utf8);
    this.kinds = header.kinds;
    this.kind = arrays["kind"]!;
    this.tied = numbered(header.tied);
    this.twice = new Set(header.twice);
    this.unreadable = header.unreadable;
    this.numels = Float64Array.from(header.kinds, ({ shape }) => shape.reduce((a, b) => a * b, 1));
    this.sizes = this.numels.map((numel, kind) => numel * header.kinds[kind]!.itemsize);
  }

  /** The shape and dtype as text. */
  kindText = (kind: number): string => {
    const { shape, dtype } = this.kinds[kind]!;
    return `${dtype} [${shape.join(", ")}]`;
  };

  kindOf(n: number): Kind {
    return this.kinds[this.kind[n]!]!;
  }

  numel(n: number): number {
    return this.numels[this.kind[n]!]!;
  }

  bytes(n: number): number {
    return this.sizes[this.kind[n]!]!;
  }
}

function numbered(record: Record<string, string>): Map<number, string> {
  return new Map(Object.entries(record).map(([n, text]) => [Number(n), text]));
}

const KEPT = 3;
const kept = new WeakMap<Api, Map<string, Promise<State>>>();

/** The tensors of a state; those asked for last are kept, so that going from page to page asks once. */
export function loadState(api: Api, params: Params): Promise<State> {
  const states = kept.get(api) ?? kept.set(api, new Map()).get(api)!;
  const key = requestKey("tree", params);
  let found = states.get(key);
  if (found) states.delete(key);
  else {
    found = api.packed<Header>("tree", params).then((packed) => new State(packed));
    found.catch(() => states.delete(key));
  }
  states.set(key, found);
  if (states.size > KEPT) states.delete(states.keys().next().value!);
  return found;
}

export interface Marks {
  marks: Numbers;
  problems: ReadonlyMap<number, string[]>;
  lost: ReadonlyMap<number, number>;
}

export async function loadMarks(api: Api, params: Params, signal: AbortSignal): Promise<Marks> {
  const { header, arrays } = await api.packed<{ problems: Record<string, string[]>; lost: Record<string, number> }>("tree/marks", params, signal);
  const of = <T>(record: Record<string, T>) => new Map(Object.entries(record).map(([n, value]) => [Number(n), value]));
  return { marks: arrays["marks"]!, problems: of(header.problems), lost: of(header.lost) };
}

/** Norms of a state's tensors; NaN where they are not known. */
export interface Norms {
  norm: Float64Array;
  largest: Float64Array;
  /** Elements that are NaN or infinite. */
  odd: Float64Array;
  /** The number of names whose norm was asked for, from the first on. */
  known: number;
}

const norms = new WeakMap<State, Norms>();

export function keptNorms(state: State): Norms | null {
  return norms.get(state) ?? null;
}

/** Computes the norms, request by request; `progress` is called after each. What is there when it ends early is kept. */
export async function computeNorms(api: Api, state: State, params: Params, signal: AbortSignal, progress: (norms: Norms, share: number) => void): Promise<void> {
  const { count } = state.names;
  const empty = () => new Float64Array(count).fill(NaN);
  let found = norms.get(state) ?? { norm: empty(), largest: empty(), odd: empty(), known: 0 };
  let total = 0, done = 0;
  for (let n = 0; n < count; n += 1) total += state.bytes(n);
  for (let n = 0; n < found.known; n += 1) done += state.bytes(n);
  while (found.known < count) {
    const low = found.known;
    const { header, arrays } = await api.packed<{ high: number }>("tree/norms", { ...params, low }, signal);
    found.norm.set(arrays["norm"]!, low);
    found.largest.set(arrays["largest"]!, low);
    found.odd.set(arrays["odd"]!, low);
    for (let n = low; n < header.high; n += 1) done += state.bytes(n);
    found = { ...found, known: header.high };
    norms.set(state, found);
    progress(found, total ? done / total : 1);
  }
}
