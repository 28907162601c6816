// The signed difference of one tensor, the first minus the second, as a heat map.

import { useMemo, useState } from "preact/hooks";
import type { Numbers } from "../api";
import { useExplorer, useLoaded } from "../context";
import { planeOf, REPORTED } from "../pages/tensor";
import type { Pair } from "./load";
import type { Facts } from "../tensor/cards";
import { askedStep } from "../parts/steps";
import { colourTable, css } from "../ui/colours";
import { limitsText, marksOf, rounded, scaleOf, type ScaleKind } from "../ui/colourscale";
import { useDark } from "../ui/dark";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { HeatMap, type Values } from "../ui/heatmap";
import { Legend } from "../ui/legend";
import { partOf, partText, rootTile, whole, type Tile } from "../ui/pyramid";
import { useLines } from "../ui/python";
import { seenOf, type Seen } from "../ui/seen";
import { grouped, shownName } from "../ui/text";

const MOST = 512; // rows and columns of cells of the whole

interface Props {
  name: string;
  pair: Pair;
  /** The two steps of a run. */
  steps: [number, number] | null;
}

export function DifferencePicture({ name, pair, steps }: Props) {
  const { api } = useExplorer();
  const { state, step } = pair;
  const facts = useLoaded((signal) => api.json<Facts>("tensor", { name, state, step }, signal), [name, state, step]);
  if (facts.error) return <Failure error={facts.error} />;
  if (!facts.value || facts.value.name !== name) return <p class="compare-wait quiet">reading {shownName(name)} …</p>;
  return <Picture key={`${name}/${state}/${steps}`} {...{ pair, steps }} facts={facts.value} />;
}

function Picture({ facts, pair, steps }: Omit<Props, "name"> & { facts: Facts }) {
  const context = useExplorer();
  const { api, route, go } = context;
  const { params } = route;
  const { name } = facts;
  const plane = useMemo(() => planeOf(facts, params), [facts, params["dims"], params["at"]]);
  const kind: ScaleKind = params["scale"] === "symlog" ? "symlog" : "linear";
  const ask = async (tile: Tile, signal: AbortSignal): Promise<Values> => {
    const place = { r0: tile.r0, r1: tile.r1, c0: tile.c0, c1: tile.c1, rows: tile.rows, cols: tile.cols };
    const { header, arrays } = await api.packed<{ exact: boolean; single: boolean }>(
      "compare/tile", { name, ...pair, ...plane.query, ...(api.live ? place : { ...REPORTED, exact: "auto" }) }, signal,
    );
    const mean = arrays["mean"] as Numbers;
    return { mean, min: arrays["min"] ?? mean, max: arrays["max"] ?? mean, nan: arrays["nan"], inf: arrays["inf"], ...header };
  };
  const everything = rootTile(plane.size, MOST);
  const first = api.live ? everything : { ...everything, rows: Math.min(REPORTED.rows, plane.size.height), cols: Math.min(REPORTED.cols, plane.size.width) };
  const root = useLoaded((signal) => ask(first, signal), [facts, plane.query.dims, plane.query.at]);
  const all = useMemo(() => root.value && seenOf([{ tile: first, values: root.value }], whole(plane.size), "mean"), [root.value]);
  const [seen, setSeen] = useState<Seen>();
  const scale = useMemo(() => {
    const values = (seen ?? all)?.values ?? new Float64Array(0);
    // zero is in the middle, also if all differences have one sign
    const most = values.length ? Math.max(Math.abs(values[0]!), Math.abs(values[values.length - 1]!)) || 1 : 1;
    return rounded(scaleOf(values, kind, "full", [-most, most]), values);
  }, [all, seen, kind]);
  const dark = useDark();
  const table = useMemo(() => colourTable(dark ? "signedDark" : "signed"), [dark]);
  const indexText = (row: number, col: number) => {
    if (plane.ndim === 0) return "[]";
    if (plane.ndim === 1) return `[${row * (plane.wrap ?? 0) + col}]`;
    return `[${Array.from({ length: plane.ndim }, (_, n) => (n === plane.row ? row : n === plane.col ? col : (plane.at.get(n) ?? ":"))).join(", ")}]`;
  };
  const lines = useLines({ page: "compare", name, ...pair, dims: params["dims"], at: params["at"], view: params["view"], scale: params["scale"], limits: limitsText(scale) });
  // a run shows the step of that side, which is then compared with the other one
  const look = (n: 0 | 1) => {
    const there = steps ? { step: askedStep(context, steps[n]), with: api.live ? String(steps[1 - n]) : undefined } : { side: n ? "b" : undefined };
    return api.holds("tensor", { name, state: pair.state, ...there, with: undefined }) ? () => go({ name, ...there }, "tensor") : undefined;
  };
  return (
    <Figure
      title="A − B"
      name={`${name}.difference`}
      note={
        <>
          <span class="mono">{shownName(name)}</span>, {(seen ?? all)?.single ? "each element" : "mean of each cell"}
          {root.value && !root.value.exact ? ", of a sample of the elements" : ""}
        </>
      }
      tools={
        <>
          <label class="compare-option">
            colours
            <select value={kind} onChange={(event) => go({ scale: event.currentTarget.value === "linear" ? undefined : event.currentTarget.value }, undefined, true)}>
              <option value="linear">linear</option>
              <option value="symlog">symmetric log</option>
            </select>
          </label>
          {([0, 1] as const).map((n) => (
            <button key={n} type="button" class="small" disabled={!look(n)} onClick={look(n)}>
              in {"AB"[n]}
            </button>
          ))}
        </>
      }
      python={lines["picture"]}
    >
      {root.error ? (
        <Failure error={root.error} />
      ) : !root.value || !plane.size.height || !plane.size.width ? (
        <p class="compare-wait quiet">{root.value ? "The tensor has no elements." : "reading both tensors …"}</p>
      ) : (
        <>
          <HeatMap
            size={plane.size}
            first={first}
            root={root.value}
            most={MOST}
            load={api.live ? ask : undefined}
            how="mean"
            scale={scale}
            table={table}
            part={partOf(params["view"])}
            onPart={(part) => go({ view: part && partText(part) }, undefined, true)}
            {...(api.live ? { onSeen: setSeen } : {})}
            label={`Heat map of the difference of ${shownName(name)}`}
            rowTitle={plane.row === null ? (plane.wrap ? `rows of ${grouped(plane.wrap)}` : "") : `dimension ${plane.row}`}
            colTitle={plane.col === null ? "" : `dimension ${plane.col}`}
            indexText={indexText}
            height={440}
          />
          <Legend title="A − B" colour={(share) => css(table, share)} marks={marksOf(scale)} />
        </>
      )}
    </Figure>
  );
}
