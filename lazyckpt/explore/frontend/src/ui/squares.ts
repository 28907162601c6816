// The rectangles of a treemap (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000).

export interface Rect {
  x: number;
  y: number;
  w: number;
  h: number;
}

/** Divides a rectangle among values (largest first, all above 0) by area, in rectangles that are nearly squares. */
export function squarified(values: number[], room: Rect): Rect[] {
  const total = values.reduce((a, b) => a + b, 0);
  const found: Rect[] = [];
  if (!(total > 0)) return found;
  const areas = values.map((value) => (value / total) * room.w * room.h);
  let { x, y, w, h } = room;
  let at = 0;
  while (at < areas.length) {
    const side = Math.min(w, h);
    let end = at + 1;
    let sum = areas[at]!;
    while (end < areas.length && worst(areas, at, end + 1, sum + areas[end]!, side) <= worst(areas, at, end, sum, side)) {
      sum += areas[end]!;
      end += 1;
    }
    const depth = side > 0 ? sum / side : 0;
    let along = 0;
    for (let n = at; n < end; n += 1) {
      const length = depth > 0 ? areas[n]! / depth : 0;
      found.push(w >= h ? { x, y: y + along, w: depth, h: length } : { x: x + along, y, w: length, h: depth });
      along += length;
    }
    if (w >= h) [x, w] = [x + depth, Math.max(0, w - depth)];
    else [y, h] = [y + depth, Math.max(0, h - depth)];
    at = end;
  }
  return found;
}

/** The worst ratio of sides in a row of areas. */
function worst(areas: number[], start: number, end: number, sum: number, side: number): number {
  const most = areas[start]!, least = areas[end - 1]!; // they are sorted
  return Math.max((side * side * most) / (sum * sum), (sum * sum) / (side * side * least));
}
