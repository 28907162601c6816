// The ranks of a mesh in rows and columns, or the files of a checkpoint, if their ranks are not known.

import { natural } from "../tree/nodes";

export type Axis = "tp" | "pp" | "dp" | "ep";

export interface Rank {
  rank: Record<Axis, number> | null;
  tensors: number;
  nbytes: number;
  missing: number;
  files: number[];
}

export interface File {
  path: string;
  size: number | null;
  tensors: number;
  nbytes: number;
  missing: string;
  problems: { code: string; severity: string; text: string; advice: string }[];
}

export interface Ranks {
  mesh: Record<Axis, number>;
  ranks: Rank[];
  files: File[];
  files_in_all: number;
  lost: [string, string, number][];
  lost_in_all: number;
}

export interface GridOf {
  rows: string[];
  columns: string[];
  cells: (Rank | undefined)[];
  values: Float64Array;
  rowTitle: string | undefined;
  columnTitle: string | undefined;
  range: [number, number];
  isMesh: boolean;
}

/** The axes of a mesh, the outermost first: the order of rows, columns and texts. */
const AXES: Axis[] = ["pp", "dp", "ep", "tp"];
const WIDE = 32; // ranks in a row, if there is only one axis

/** The ranks: the outer half of the axes are rows, the others columns. Without ranks, the files. */
export function gridOf(found: Ranks, of: string): GridOf {
  const known = found.ranks.filter((rank) => rank.rank);
  const value = (rank: Rank) => (of === "bytes" ? rank.nbytes : of === "tensors" ? rank.tensors : rank.files.length);
  if (!known.length) return filesOf(found, of);
  const size = (axis: Axis) => Math.max(found.mesh[axis], 1 + Math.max(...known.map(({ rank }) => rank![axis])));
  // all data-parallel or expert-parallel ranks may have the files of one of them: then these axes have no cells
  const apart = (axis: Axis) => known.some(({ rank }) => rank![axis] !== known[0]!.rank![axis]);
  const used = AXES.filter((axis) => size(axis) > 1 && (axis === "tp" || axis === "pp" || apart(axis)));
  const down = used.slice(0, Math.floor(used.length / 2));
  const across = used.slice(down.length);
  const index = (axes: Axis[], rank: Record<Axis, number>) => axes.reduce((n, axis) => n * size(axis) + rank[axis], 0);
  const labels = (axes: Axis[]): string[] => // "" without axes: there is nothing to number
    axes.reduce<string[]>((list, axis) => list.flatMap((text) => Array.from({ length: size(axis) }, (_, n) => (text ? `${text}.${n}` : String(n)))), [""]);
  let rows = labels(down);
  let columns = labels(across);
  let titles = [down.join(".") || undefined, across.join(".") || "rank"];
  const count = columns.length;
  if (used.length === 1 && count > WIDE) {
    const width = count <= 256 ? 16 : WIDE;
    rows = Array.from({ length: Math.ceil(count / width) }, (_, n) => String(n * width));
    columns = Array.from({ length: width }, (_, n) => `+${n}`);
    titles = [across[0], undefined];
  }
  const cells: (Rank | undefined)[] = new Array<Rank | undefined>(rows.length * columns.length).fill(undefined);
  for (const rank of known) cells[index(down, rank.rank!) * count + index(across, rank.rank!)] = rank;
  return { rows, columns, cells, ...filled(cells, value), rowTitle: titles[0], columnTitle: titles[1], isMesh: true };
}

function filesOf(found: Ranks, of: string): GridOf {
  const width = Math.min(32, Math.max(1, found.files.length));
  const height = Math.max(1, Math.ceil(found.files.length / width));
  const order = found.files.map((_, n) => n).sort((a, b) => natural(found.files[a]!.path, found.files[b]!.path));
  const cells: (Rank | undefined)[] = Array.from({ length: width * height }, (_, n) => {
    const number = order[n];
    const file = number === undefined ? undefined : found.files[number];
    return file && { rank: null, tensors: file.tensors, nbytes: file.nbytes, missing: file.missing ? file.nbytes : 0, files: [number!] };
  });
  const value = (rank: Rank) => (of === "bytes" ? rank.nbytes : of === "tensors" ? rank.tensors : 1);
  return {
    rows: Array.from({ length: height }, (_, n) => String(n * width)),
    columns: Array.from({ length: width }, (_, n) => String(n)),
    cells, ...filled(cells, value), rowTitle: "file", columnTitle: undefined, isMesh: false,
  };
}

function filled(cells: (Rank | undefined)[], value: (rank: Rank) => number): { values: Float64Array; range: [number, number] } {
  const values = Float64Array.from(cells, (rank) => (rank ? value(rank) : NaN));
  return { values, range: [0, Math.max(1, ...values.filter((one) => !Number.isNaN(one)))] };
}

export function meshText(mesh: Record<Axis, number>): string {
  return AXES.filter((axis) => mesh[axis] > 1).map((axis) => `${axis} ${mesh[axis]}`).join(" × ") || "one rank";
}

export function rankText(rank: Record<Axis, number>, mesh: Record<Axis, number>): string {
  return AXES.filter((axis) => mesh[axis] > 1).map((axis) => `${axis} ${rank[axis]}`).join(" ") || "0";
}
