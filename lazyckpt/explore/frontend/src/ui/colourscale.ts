// From values to positions on a colour map: linear, symmetric logarithmic, or by rank.

import { shortNumber } from "./axis";

export type ScaleKind = "linear" | "symlog" | "quantile";

export interface Scale {
  kind: ScaleKind;
  low: number;
  high: number;
  /** Whether zero is in the middle of a map with two sides. */
  signed: boolean;
  /** The position of a value: 0 to 1, also for values outside of the range. */
  position(value: number): number;
  /** The value at a position. */
  value(position: number): number;
}

const DECADES = 3; // of a symmetric logarithmic scale, below its greatest value

/** The value below which a share of ascending values lies. */
export function quantile(sorted: ArrayLike<number>, share: number): number {
  if (!sorted.length) return NaN;
  const at = share * (sorted.length - 1);
  const left = Math.floor(at);
  const a = sorted[left]!;
  const b = sorted[Math.min(left + 1, sorted.length - 1)]!;
  return a + (at - left) * (b - a);
}

/**
 * A scale for values.
 *
 * @param sorted values that are shown, ascending
 * @param range "robust": from the 0.5th to the 99.5th percentile of them; "full": from `full[0]` to `full[1]`
 * @param fromZero whether the range begins at zero
 */
export function scaleOf(
  sorted: ArrayLike<number>,
  kind: ScaleKind,
  range: "robust" | "full",
  full: [number, number] = [sorted[0] ?? 0, sorted[sorted.length - 1] ?? 0],
  fromZero = false,
): Scale {
  let [low, high] = range === "full" ? full : [fromZero ? 0 : quantile(sorted, 0.005), quantile(sorted, 0.995)];
  if (!(Number.isFinite(low) && Number.isFinite(high))) [low, high] = [0, 1];
  const signed = low < 0 && high > 0;
  if (signed) {
    high = Math.max(-low, high);
    low = -high;
  }
  if (low === high) {
    const margin = Math.max(Math.abs(low) * 1e-6, 1e-12);
    [low, high] = [low - margin, high + margin];
  }
  const clip = (x: number) => (x < 0 ? 0 : x > 1 ? 1 : x);
  if (kind === "quantile" && sorted.length > 1) {
    const last = sorted.length - 1;
    return {
      kind, low, high, signed: false,
      position(value) {
        let a = 0;
        let b = last;
        while (a < b) {
          const middle = (a + b) >> 1;
          if (sorted[middle]! < value) a = middle + 1;
          else b = middle;
        }
        return a / last;
      },
      value: (position) => quantile(sorted, clip(position)),
    };
  }
  if (kind === "symlog") {
    const least = Math.max(Math.abs(low), Math.abs(high)) / 10 ** DECADES;
    const bend = (x: number) => Math.sign(x) * Math.log1p(Math.abs(x) / least);
    const [a, b] = [bend(low), bend(high)];
    return {
      kind, low, high, signed,
      position: (value) => clip((bend(value) - a) / (b - a)),
      value(position) {
        const x = a + clip(position) * (b - a);
        return Math.sign(x) * Math.expm1(Math.abs(x)) * least;
      },
    };
  }
  return {
    kind, low, high, signed,
    position: (value) => clip((value - low) / (high - low)),
    value: (position) => low + clip(position) * (high - low),
  };
}

/** Where five numbers stand beside the colours of a scale. */
export function marksOf(scale: Scale): { at: number; text: string }[] {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, text: shortNumber(Number(scale.value(at).toPrecision(3))) }));
  return marks[0]!.text === marks[4]!.text ? [marks[2]!] : marks; // all values are the same
}

/** The ends of the colours as text, rounded; undefined where colours have none: by rank, or around a single value. */
export function limitsText({ kind, low, high, signed }: Scale): string | undefined {
  if (kind === "quantile" || signed !== (low < 0 && high > 0)) return undefined;
  const step = 10 ** Math.floor(Math.log10(high - low) - 3);
  const round = (x: number) => Number((Math.round(x / step) * step).toPrecision(12));
  const [a, b] = [round(low), round(high)];
  return Number.isFinite(b - a) && Math.abs(b - a - (high - low)) < 3 * step ? `${a},${b}` : `${low},${high}`;
}

/** A scale whose ends are those that its text says. */
export function rounded(scale: Scale, sorted: ArrayLike<number>): Scale {
  const limits = limitsOf(limitsText(scale));
  return limits ? scaleOf(sorted, scale.kind, "full", limits) : scale;
}

/** The ends of the colours that a text says. */
export function limitsOf(text: string | undefined): [number, number] | undefined {
  const [low, high] = (text ?? "").split(",").map(Number);
  return low! < high! && Number.isFinite(high! - low!) ? [low!, high!] : undefined;
}
