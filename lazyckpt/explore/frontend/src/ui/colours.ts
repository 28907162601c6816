// Colour maps that people with any colour vision can read, and colours for kinds of things.

export type Rgb = [number, number, number];

const hex = (text: string): Rgb[] =>
  text.split(" ").map((one) => [0, 2, 4].map((at) => parseInt(one.slice(at, at + 2), 16)) as Rgb);

// viridis and cividis of matplotlib (CC0).
const MAPS = {
  viridis: hex("440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725"),
  cividis: hex("00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 e1cc55 fee838"),
  signed: hex("08306b 2171b5 8fc1e3 f4f4f2 f7b267 d9590b 7f2704"),
  signedDark: hex("bfe1ff 4aa3f0 1f5c99 262c33 a8510f f28c28 ffd9a8"),
};

export type MapName = keyof typeof MAPS;

/** A table of 256 colours, as bytes of red, green and blue. */
export function colourTable(name: MapName): Uint8Array {
  const stops = MAPS[name];
  const table = new Uint8Array(256 * 3);
  for (let n = 0; n < 256; n += 1) {
    const at = (n / 255) * (stops.length - 1);
    const left = Math.min(Math.floor(at), stops.length - 2);
    for (let k = 0; k < 3; k += 1) {
      table[3 * n + k] = Math.round(stops[left]![k]! + (at - left) * (stops[left + 1]![k]! - stops[left]![k]!));
    }
  }
  return table;
}

export function css(table: Uint8Array, position: number): string {
  const n = 3 * Math.max(0, Math.min(255, Math.round(position * 255)));
  return `rgb(${table[n]},${table[n + 1]},${table[n + 2]})`;
}

/** Whether text on a colour of a table is better dark than light. */
export function isBright(table: Uint8Array, position: number): boolean {
  const n = 3 * Math.max(0, Math.min(255, Math.round(position * 255)));
  return 0.299 * table[n]! + 0.587 * table[n + 1]! + 0.114 * table[n + 2]! > 140;
}

/** Distinct colours, of Okabe and Ito, for things without an order. */
export const CATEGORIES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a125", "#7f7f7f"];

export function categoryColour(n: number): string {
  return CATEGORIES[n % CATEGORIES.length]!;
}
