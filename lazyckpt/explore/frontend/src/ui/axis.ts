// Axes: where ticks stand and how numbers on them are written.

import { grouped } from "./text";

/** About `wanted` round numbers from low to high; of whole numbers, only such. */
export function ticks(low: number, high: number, wanted = 5, whole = false): number[] {
  if (!(high > low) || !Number.isFinite(low) || !Number.isFinite(high)) return [low];
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const round = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999)!;
  const step = whole ? Math.max(1, round) : round;
  const found: number[] = [];
  const first = Math.ceil(low / step - 1e-9);
  if (Math.abs(first) > 2 ** 50) return [low]; // the next number would be the same one
  for (let n = first; n * step <= high + step * 1e-9; n += 1) found.push(n * step + 0); // never -0
  return found;
}

/** A number on an axis of whole numbers, such as steps and layers. */
export function wholeText(x: number): string {
  return Math.abs(x) < 1e9 ? grouped(x) : shortNumber(x);
}

/** Powers of ten from low to high (both above 0), at most about `wanted` of them; if there are fewer than two, also 2 and 5 times these. */
export function logTicks(low: number, high: number, wanted = 5): number[] {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  if (last < first + 1) {
    const fine = [first - 1, first, last].flatMap((n) => [1, 2, 5].map((m) => Number(`${m}e${n}`)));
    const inside = [...new Set(fine)].filter((x) => x >= low * (1 - 1e-9) && x <= high * (1 + 1e-9));
    return inside.length > 1 ? inside : ticks(low, high, wanted);
  }
  const step = Math.max(1, Math.ceil((last - first) / wanted));
  const found: number[] = [];
  for (let n = first; n <= last; n += step) found.push(10 ** n);
  return found;
}

/** Ticks as text, with as many digits as tell them apart. */
export function tickText(marks: readonly number[]): string[] {
  const texts = marks.map(shortNumber);
  if (new Set(texts).size === texts.length) return texts;
  const step = Math.abs(marks[1]! - marks[0]!);
  const size = Math.max(...marks.map(Math.abs));
  const digits = Math.min(17, Math.ceil(Math.log10(size / step)) + 1);
  return marks.map((x) => (size >= 1e7 || size < 1e-3 ? x.toExponential(digits - 1).replace("e+", "e") : String(Number(x.toPrecision(digits)))));
}

/** A number with four significant digits, as people write it. */
export function shortNumber(x: number): string {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-3) return x.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  return String(Number(x.toPrecision(4)));
}
