// The arithmetic of a picture that is zoomed: which part is seen, and which tiles of which level show it.

export const TILE = 256; // rows and columns of a tile, in cells

/** A part of the picture, in elements; edges may lie inside of elements. */
export interface Part {
  r0: number;
  r1: number;
  c0: number;
  c1: number;
}

export interface Size {
  height: number;
  width: number;
}

/** A tile: whole elements, divided into cells of 2 ** level of them. */
export interface Tile extends Part {
  key: string;
  rows: number;
  cols: number;
}

const LARGEST = 96; // pixels of an element at the highest zoom

/** The level at which a picture fits into `most` cells. */
export function rootLevel(length: number, most: number): number {
  let level = 0;
  while (Math.ceil(length / 2 ** level) > most) level += 1;
  return level;
}

/** The level whose cells are at least a pixel large. */
export function levelOf(elements: number, pixels: number, root: number): number {
  return Math.min(root, Math.max(0, Math.ceil(Math.log2(elements / pixels) - 1e-9)));
}

/** The whole picture as one tile. */
export function rootTile(size: Size, most: number): Tile {
  const [a, b] = [rootLevel(size.height, most), rootLevel(size.width, most)];
  return {
    key: "root", r0: 0, r1: size.height, c0: 0, c1: size.width,
    rows: Math.ceil(size.height / 2 ** a), cols: Math.ceil(size.width / 2 ** b),
  };
}

const NEARLY = 0.9; // of the picture: the root tile is enough for so large a part

/** The tiles that show a part at some number of pixels, from its middle outwards; none if the root tile does. */
export function tilesFor(part: Part, pixels: Size, size: Size, most: number): Tile[] {
  const roots = [rootLevel(size.height, most), rootLevel(size.width, most)] as const;
  const a = levelOf(part.r1 - part.r0, pixels.height, roots[0]);
  const b = levelOf(part.c1 - part.c0, pixels.width, roots[1]);
  if (a === roots[0] && b === roots[1]) return [];
  if ((part.r1 - part.r0) * (part.c1 - part.c0) > NEARLY * size.height * size.width) return [];
  const [high, wide] = [TILE * 2 ** a, TILE * 2 ** b];
  const found: Tile[] = [];
  const rows = [Math.floor(Math.max(0, part.r0) / high), Math.ceil(Math.min(size.height, part.r1) / high)] as const;
  const cols = [Math.floor(Math.max(0, part.c0) / wide), Math.ceil(Math.min(size.width, part.c1) / wide)] as const;
  for (let i = rows[0]; i < rows[1]; i += 1) {
    for (let j = cols[0]; j < cols[1]; j += 1) {
      const r1 = Math.min((i + 1) * high, size.height);
      const c1 = Math.min((j + 1) * wide, size.width);
      found.push({
        key: `${a}.${b}.${i}.${j}`, r0: i * high, r1, c0: j * wide, c1,
        rows: Math.ceil((r1 - i * high) / 2 ** a), cols: Math.ceil((c1 - j * wide) / 2 ** b),
      });
    }
  }
  const [r, c] = [(part.r0 + part.r1) / 2, (part.c0 + part.c1) / 2];
  const away = (t: Tile) => Math.abs((t.r0 + t.r1) / 2 - r) / high + Math.abs((t.c0 + t.c1) / 2 - c) / wide;
  return found.sort((x, y) => away(x) - away(y));
}

function interval(a: number, b: number, length: number, pixels: number): [number, number] {
  let span = b - a;
  const least = Math.min(length, pixels / LARGEST);
  span = Math.min(length, Math.max(least, span));
  let start = (a + b) / 2 - span / 2;
  start = Math.min(length - span, Math.max(0, start));
  return [start, start + span];
}

/** The nearest part that lies in the picture and is neither too large nor too small. */
export function within(part: Part, size: Size, pixels: Size): Part {
  const [r0, r1] = interval(part.r0, part.r1, size.height, pixels.height);
  const [c0, c1] = interval(part.c0, part.c1, size.width, pixels.width);
  return { r0, r1, c0, c1 };
}

export function whole(size: Size): Part {
  return { r0: 0, r1: size.height, c0: 0, c1: size.width };
}

/** A part scaled by a factor around a point of it (shares of its height and width). */
export function zoomed(part: Part, factor: number, y: number, x: number): Part {
  const [high, wide] = [part.r1 - part.r0, part.c1 - part.c0];
  const [r, c] = [part.r0 + y * high, part.c0 + x * wide];
  return { r0: r - y * high * factor, r1: r + (1 - y) * high * factor, c0: c - x * wide * factor, c1: c + (1 - x) * wide * factor };
}

/** A part around an element, in which it is large enough to read. */
export function around(row: number, col: number, size: Size, pixels: Size): Part {
  const [high, wide] = [pixels.height / 32, pixels.width / 72];
  return within({ r0: row + 0.5 - high / 2, r1: row + 0.5 + high / 2, c0: col + 0.5 - wide / 2, c1: col + 0.5 + wide / 2 }, size, pixels);
}

/** A part as text for links, and back. */
export function partText(part: Part): string {
  return [part.r0, part.r1, part.c0, part.c1].map((x) => String(Math.round(x * 100) / 100)).join(",");
}

export function partOf(text: string | undefined): Part | undefined {
  const [r0, r1, c0, c1] = (text ?? "").split(",").map(Number);
  return r1! > r0! && c1! > c0! ? { r0: r0!, r1: r1!, c0: c0!, c1: c1! } : undefined;
}
