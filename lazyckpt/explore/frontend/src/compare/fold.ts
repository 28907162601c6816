// The rows of a comparison by layer and kind, and as a tree in which the layers of a kind are folded.

import { grouped } from "../ui/text";

export interface Difference {
  name: string;
  status: "equal" | "values" | "dtype" | "shape" | "only in a" | "only in b" | "unreadable";
  a: string | null;
  b: string | null;
  count: number | null;
  max_abs: number | null;
  at: number[] | null;
  error: string | null;
  relative: number | null;
  cosine: number | null;
  norm_a: number | null;
  norm_b: number | null;
  /** Number of the kind. */
  kind: number;
  layer: number | null;
}

export type Measure = "relative" | "angle";

/** Tensors of one kind, or of one kind and layer. */
export interface Fold {
  rows: Difference[];
  /** Root mean square of the relative differences; null if no elements were compared. */
  relative: number | null;
  /** The smallest cosine. */
  cosine: number | null;
  max_abs: number | null;
  /** The row that differs most. */
  worst: Difference;
  equal: number;
  /** Whether a tensor is missing on one side, has another shape there, or cannot be read. */
  odd: boolean;
}

const ODD = new Set(["shape", "only in a", "only in b", "unreadable"]);

/** How far two tensors are apart, to compare rows by; a tensor that comes from zero is farthest. */
export function farness(row: Difference): number {
  if (row.relative !== null) return row.relative;
  return row.norm_a === 0 && row.norm_b ? Infinity : ODD.has(row.status) ? -1 : -2;
}

export function foldOf(rows: Difference[]): Fold {
  const relatives = rows.flatMap(({ relative }) => relative ?? []);
  const cosines = rows.flatMap(({ cosine }) => cosine ?? []);
  const largest = rows.flatMap(({ max_abs }) => max_abs ?? []);
  return {
    rows,
    relative: relatives.length ? Math.sqrt(relatives.reduce((sum, x) => sum + x * x, 0) / relatives.length) : null,
    cosine: cosines.length ? cosines.reduce((a, b) => Math.min(a, b)) : null,
    max_abs: largest.length ? largest.reduce((a, b) => Math.max(a, b)) : null,
    worst: rows.reduce((a, b) => (farness(b) > farness(a) ? b : a)),
    equal: rows.filter(({ status }) => status === "equal").length,
    odd: rows.some(({ status }) => ODD.has(status)),
  };
}

function groups<K>(rows: readonly Difference[], key: (row: Difference) => K): Map<K, Difference[]> {
  const found = new Map<K, Difference[]>();
  for (const row of rows) {
    const one = found.get(key(row));
    if (one) one.push(row);
    else found.set(key(row), [row]);
  }
  return found;
}

/** Kind -> its tensors. */
export function byKind(rows: readonly Difference[]): Map<number, Fold> {
  return new Map([...groups(rows, ({ kind }) => kind)].map(([kind, some]) => [kind, foldOf(some)]));
}

/** "kind/layer" -> the tensors of both. */
export function byCell(rows: readonly Difference[]): Map<string, Fold> {
  return new Map([...groups(rows, cellKey)].map(([key, some]) => [key, foldOf(some)]));
}

export function cellKey({ kind, layer }: { kind: number; layer: number | null }): string {
  return `${kind}/${layer ?? ""}`;
}

/** What is drawn of a fold: its relative difference, or 1 minus its cosine; NaN if there is none. */
export function measured(fold: Fold | undefined, measure: Measure): number {
  if (!fold) return NaN;
  if (measure === "relative") return fold.relative ?? NaN;
  return fold.cosine === null ? NaN : Math.max(0, 1 - fold.cosine);
}

/** A line of the tree: a kind with its number of tensors, or a tensor below it. */
export type Line = { kind: number; fold: Fold; open: boolean; single: boolean } | { row: Difference };

/** The lines of the tree: kinds that differ most first, those that are open with their tensors in the order of layers. */
export function linesOf(kinds: Map<number, Fold>, open: ReadonlySet<number>): Line[] {
  const sorted = [...kinds].sort(([m, a], [n, b]) => farness(b.worst) - farness(a.worst) || Number(b.odd) - Number(a.odd) || m - n);
  return sorted.flatMap(([kind, fold]): Line[] => {
    const single = fold.rows.length === 1;
    const head = { kind, fold, open: !single && open.has(kind), single };
    if (!head.open) return [head];
    const rows = [...fold.rows].sort((a, b) => (a.layer ?? -1) - (b.layer ?? -1) || (a.name < b.name ? -1 : 1));
    return [head, ...rows.map((row) => ({ row }))];
  });
}

/** A cosine as text; close to 1 as what it lacks. */
export function cosineText(cosine: number | null): string {
  if (cosine === null) return "";
  if (cosine === 1) return "1";
  return cosine > 1 - 1e-5 ? `1−${(1 - cosine).toExponential(1)}` : cosine.toFixed(6);
}

const ODD_TEXT = { shape: "of another shape", "only in a": "only in A", "only in b": "only in B", unreadable: "cannot be read" };

/** What differs in the tensors of a kind. */
export function countText(fold: Fold): string {
  const all = fold.rows.length;
  if (fold.equal === all) return `all ${grouped(all)} are equal`;
  const odd = Object.entries(ODD_TEXT).flatMap(([status, text]) => {
    const count = fold.rows.filter((row) => row.status === status).length;
    return count ? `${grouped(count)} ${text}` : [];
  });
  const differ = fold.rows.filter(({ status }) => status === "values" || status === "dtype").length;
  const where = fold.worst.layer === null ? "" : `, most in layer ${fold.worst.layer}`;
  return [...(differ ? [`${grouped(differ)} of ${grouped(all)} differ${where}`] : []), ...odd].join("; ");
}
