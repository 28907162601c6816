// The most alike other expert of each expert, which comes layer by layer.

import type { Api } from "../api";
import { ApiError, type Params } from "../transport";
import { useEffect, useRef, useState } from "preact/hooks";

export interface ExpertLayers {
  layers: string[];
  experts: number[];
  /** Bytes that the comparison of each layer reads. */
  reads: number[];
}

export interface Nearest {
  layer: string;
  experts: number[];
  nearest: (number | null)[];
  cosines: (number | "NaN")[];
  exact: boolean;
}

export interface Progress {
  found: Map<string, Nearest>;
  /** Layer -> why its experts cannot be compared. */
  failed: Map<string, string>;
  reading: boolean;
  error?: Error;
}

export interface Cell {
  layer: string;
  expert: number;
  nearest: number | null;
  cosine: number;
  /** "=" of a twin, "?" of a layer that cannot be compared. */
  mark: string;
}

/** Experts with a larger cosine are called twins. */
export const TWINS = 0.99;

/** The cells of the grid, row by row; NaN where nothing is known. */
export function cellsOf({ layers, experts }: ExpertLayers, { found, failed }: Pick<Progress, "found" | "failed">): Cell[] {
  return layers.flatMap((layer) => {
    const one = found.get(layer);
    const place = new Map(one?.experts.map((expert, n) => [expert, n]));
    return experts.map((expert): Cell => {
      const n = place.get(expert);
      const cosine = n === undefined ? NaN : Number(one!.cosines[n]);
      const mark = failed.has(layer) ? "?" : cosine > TWINS ? "=" : "";
      return { layer, expert, nearest: n === undefined ? null : one!.nearest[n]!, cosine, mark };
    });
  });
}

const OFTEN = 250; // milliseconds between pictures of what is known so far
const NOTHING: Progress = { found: new Map(), failed: new Map(), reading: false };

/** Compares the experts of one layer after another while `wanted`; what is found stays. */
export function useNearest(api: Api, view: Params, listed: ExpertLayers | undefined, wanted: boolean): Progress {
  const [progress, setProgress] = useState(NOTHING);
  const held = useRef<{ of: unknown; progress: Progress }>({ of: undefined, progress: NOTHING });
  useEffect(() => {
    if (held.current.of !== listed) held.current = { of: listed, progress: NOTHING };
    let told = 0;
    const tell = (now: Progress) => {
      held.current.progress = now;
      if (now.reading && Date.now() - told < OFTEN) return;
      told = Date.now();
      setProgress(now);
    };
    if (!listed || !wanted) return tell({ ...held.current.progress, reading: false });
    const controller = new AbortController();
    void (async () => {
      for (const layer of listed.layers) {
        const { found, failed } = held.current.progress;
        if (found.has(layer) || failed.has(layer)) continue;
        if (!told) tell({ found, failed, reading: true });
        try {
          const one = await api.json<Nearest>("experts/nearest", { ...view, layer }, controller.signal);
          if (controller.signal.aborted) return;
          tell({ found: new Map(found).set(layer, one), failed, reading: true });
        } catch (error) {
          if (controller.signal.aborted) return;
          if (!(error instanceof ApiError)) return tell({ found, failed, reading: false, error: error as Error });
          if (error.kind !== "NotInReport") tell({ found, failed: new Map(failed).set(layer, error.message), reading: true });
        }
      }
      tell({ ...held.current.progress, reading: false });
    })();
    return () => controller.abort();
  }, [api, listed, wanted]);
  return progress;
}
