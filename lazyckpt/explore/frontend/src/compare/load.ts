// The comparison of two checkpoints, which comes in blocks: what is known so far can be shown.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Api } from "../api";
import { ApiError } from "../transport";
import type { Difference } from "./fold";

/** What is compared: the state of both, and of a run the two steps. */
export type Pair = { state: string | undefined; step: string | undefined; with: string | undefined };

export interface Compared {
  /** The two steps of a run. */
  steps: [number, number] | null;
  paths: [string, string];
  names: number;
  both: number;
  nbytes: number;
  counts: Record<string, number>;
  changed: [string, Difference["status"], string | null, string | null][];
  changed_in_all: number;
  prefix: [string, number] | null;
  kinds: string[];
  labels: string[];
  layers: number[];
}

export interface Progress {
  rows: Difference[];
  /** Names whose elements are compared. */
  done: number;
  reading: boolean;
  error?: Error;
}

const NOTHING: Progress = { rows: [], done: 0, reading: false };
const OFTEN = 250; // milliseconds between pictures of what is known so far

/** Compares block by block once `wanted`; ends when one looks away. */
export function useDifferences(api: Api, pair: Pair | undefined, found: Compared | undefined, wanted: boolean): Progress {
  const [progress, setProgress] = useState(NOTHING);
  const key = useRef<unknown>(undefined);
  useEffect(() => {
    if (key.current !== found) setProgress(NOTHING);
    key.current = found;
    if (!found || !wanted) return;
    const controller = new AbortController();
    void (async () => {
      const rows: Difference[] = [];
      let low = 0, told = 0;
      try {
        while (low < found.names) {
          const part = await api.json<{ high: number; rows: Difference[] }>("compare/differences", { ...pair, low }, controller.signal);
          if (controller.signal.aborted) return;
          rows.push(...part.rows);
          low = part.high;
          if (low < found.names && Date.now() - told < OFTEN) continue;
          told = Date.now();
          setProgress({ rows: rows.slice(), done: low, reading: low < found.names });
        }
      } catch (error) {
        if (controller.signal.aborted) return;
        const gone = error instanceof ApiError && error.kind === "NotInReport";
        setProgress({ rows, done: low, reading: false, ...(gone ? {} : { error: error as Error }) });
      }
    })();
    return () => controller.abort();
  }, [api, pair, found, wanted]);
  return progress;
}
