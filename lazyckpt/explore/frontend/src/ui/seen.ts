// The cells of a heat map that are in view, from which its colours follow.

import type { How, Values } from "./heatmap";
import type { Part, Tile } from "./pyramid";

export interface Seen {
  /** The finite values of the cells, ascending. */
  values: Float64Array;
  /** The least and the greatest element of these cells. */
  low: number;
  high: number;
  /** Whether each cell is one element. */
  single: boolean;
}

/** The value of a cell: what its elements are pooled to. */
export function cellValue(values: Values, how: How, n: number): number {
  if (how === "absmax") return Math.max(Math.abs(values.min[n]!), Math.abs(values.max[n]!));
  return values[how][n]!;
}

/** The cells of tiles that a part of the picture meets. */
export function seenOf(tiles: readonly { tile: Tile; values: Values }[], part: Part, how: How): Seen {
  const found = new Float64Array(tiles.reduce((n, { tile }) => n + tile.rows * tile.cols, 0));
  let count = 0, low = Infinity, high = -Infinity;
  for (const { tile, values } of tiles) {
    const rows = cellsIn(tile.r0, tile.r1, tile.rows, part.r0, part.r1);
    const cols = cellsIn(tile.c0, tile.c1, tile.cols, part.c0, part.c1);
    for (let r = rows[0]; r < rows[1]; r += 1) {
      for (let n = r * tile.cols + cols[0]; n < r * tile.cols + cols[1]; n += 1) {
        const value = cellValue(values, how, n);
        if (!Number.isFinite(value)) continue;
        found[count] = value;
        count += 1;
        low = Math.min(low, values.min[n]!);
        high = Math.max(high, values.max[n]!);
      }
    }
  }
  return { values: found.subarray(0, count).sort(), low, high, single: tiles.every(({ values }) => values.single) };
}

/** The first, and the one after the last, of the cells between two elements that an interval meets. */
function cellsIn(first: number, end: number, count: number, from: number, to: number): [number, number] {
  const each = (end - first) / count;
  const edge = (n: number) => first + Math.floor(n * each + 1e-9); // cells have whole elements
  const near = 0.006; // of an element: links have rounded edges
  if (to - near <= first || from + near >= end) return [0, 0];
  let a = Math.max(0, Math.min(count - 1, Math.floor((from - first) / each)));
  while (a < count - 1 && edge(a + 1) <= from + near) a += 1;
  let b = Math.max(a + 1, Math.min(count, Math.ceil((to - first) / each)));
  while (b > a + 1 && edge(b - 1) >= to - near) b -= 1;
  while (b < count && edge(b) < to - near) b += 1;
  return [a, b];
}
