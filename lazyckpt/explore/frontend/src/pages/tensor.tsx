// One tensor: its picture from the whole down to one element, and what its values are.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import type { Numbers } from "../api";
import { useExplorer, useLoaded } from "../context";
import { Cards, type Facts } from "../tensor/cards";
import { besideKey, besideOf, besideText, choicesOf, exchanged, toggled, type Choice, type Shown } from "../tensor/states";
import { colourTable, css } from "../ui/colours";
import { useDark } from "../ui/dark";
import { limitsOf, limitsText, marksOf, rounded, scaleOf, type ScaleKind } from "../ui/colourscale";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { HeatMap, Link, type How, type Mark, type Outline, type Values } from "../ui/heatmap";
import { Legend } from "../ui/legend";
import { CopyButton, useLines } from "../ui/python";
import { around, partOf, partText, rootTile, whole, type Size, type Tile } from "../ui/pyramid";
import { seenOf, type Seen } from "../ui/seen";
import { shortNumber } from "../ui/axis";
import { bytes, counted, grouped, shownName, shownTensor } from "../ui/text";
import "./tensor.css";

/** The parameters of the page that its lines of Python depend on, besides those of the tensor. */
const SAID = ["dims", "at", "view", "how", "scale", "range", "exact", "counts", "bins"];

function toldOf(params: Record<string, string>, limits: string | undefined) {
  return { ...Object.fromEntries(SAID.map((key) => [key, params[key]])), limits };
}

const LIVE = 512; // rows and columns of cells of the whole
const REPORT = 64; // the same in a report
const ALL = 64 << 20; // bytes of which everything is read without being asked for
/** How a report has its pictures: rounded means. */
export const REPORTED = { rows: REPORT, cols: REPORT, how: "mean", fraction: 11 };

const NONE: Seen = { values: new Float64Array(0), low: NaN, high: NaN, single: false };

const DERIVED: Record<string, string> = {
  update: "what the last step of the optimizer added to the weight, computed from its states",
  change: "this step minus the one before",
};

interface Layout {
  row_dim: number | null;
  col_dim: number | null;
  cells: { rows: [number, number]; cols: [number, number]; holders: number[]; missing: boolean }[];
  labels: [string, string][];
}

export function TensorPage() {
  const { api, route } = useExplorer();
  const { name, state, step, side, of } = route.params;
  const loaded = useLoaded(async (signal) => {
    if (name === undefined) return undefined;
    const common = { name, state, step, side, of };
    return { common, facts: await api.json<Facts>("tensor", common, signal) };
  }, [name, state, step, side, of]);
  if (name === undefined) return <p class="quiet">Choose a tensor on the page “Tensors”.</p>;
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!loaded.value || loaded.value.facts.name !== name) return <p class="quiet">Opening {shownTensor(name)} …</p>;
  const { common, facts } = loaded.value; // those before, until the new ones are here
  return <Tensor key={`${name}/${facts.state}/${common.step}/${common.side}/${facts.of}`} {...{ common, facts }} />;
}

/** How the tensor is drawn, by the parameters of the link. */
export function planeOf(facts: Facts, params: Record<string, string>) {
  const shape = facts.numbers ?? facts.shape;
  const ndim = shape.length;
  const chosen = (params["dims"] ?? "").split(",").map(Number);
  const good = ndim > 2 && chosen.length === 2 && chosen.every((n) => n >= 0 && n < ndim) && chosen[0] !== chosen[1];
  const [row, col] = ndim < 2 ? [null, ndim ? 0 : null] : good ? [chosen[0]!, chosen[1]!] : [ndim - 2, ndim - 1];
  const at = new Map<number, number>();
  for (const pair of ndim > 2 ? (params["at"] ?? "").split(",").filter(Boolean) : []) {
    const [d, n] = pair.split(":").map(Number);
    if (d !== row && d !== col && n! < (shape[d!] ?? 0)) at.set(d!, n!);
  }
  const wrap = facts.wrap ?? undefined;
  const size: Size =
    ndim === 0 ? { height: 1, width: 1 }
    : ndim === 1 ? { height: wrap ? Math.ceil(shape[0]! / wrap) : 1, width: wrap ?? shape[0]! }
    : { height: shape[row!]!, width: shape[col!]! };
  const query = {
    dims: good ? `${row},${col}` : undefined,
    at: [...at].map(([d, n]) => `${d}:${n}`).join(",") || undefined,
    wrap,
  };
  const packing = ndim && shape[ndim - 1]! > facts.shape[ndim - 1]! ? 2 : 1;
  return { shape, ndim, row, col, at, wrap, size, query, packing };
}

/** A tensor as a request asks for it. */
type Common = Record<"name" | "state" | "step" | "side" | "of", string | undefined>;

function Tensor({ facts, common }: { facts: Facts; common: Common }) {
  const { api, about, route, go } = useExplorer();
  const { params } = route;
  const { name } = facts;
  const own = about.sides[common.side === "b" ? 1 : 0]?.state;
  const choices = choicesOf(api.live ? facts : { ...facts, derived: [] });
  const chosen = api.live ? besideOf(params["beside"]) : [];
  const beside = choices.filter((one) => one.fits && besideKey(one) !== besideKey(facts) && chosen.some((other) => besideKey(other) === besideKey(one)));
  const show = (next: Choice) =>
    go({
      state: next.state === own ? undefined : next.state, of: next.of || undefined, limits: undefined, view: next.fits ? params["view"] : undefined,
      beside: besideText(exchanged(beside, { state: facts.state, of: facts.of }, next)),
    });
  const plane = useMemo(() => planeOf(facts, params), [facts, params["dims"], params["at"]]);
  const { size } = plane;
  const [marks, setMarks] = useState<Mark[]>([]);
  const empty = size.height === 0 || size.width === 0;
  const part = partOf(params["view"]);
  const [limits, setLimits] = useState<string>();
  const lines = useLines({ ...common, ...(api.live ? toldOf(params, limits) : {}) });
  const look = (row: number, col: number) => go({ view: partText(around(row, col, size, { height: 470, width: 800 })) });
  const jump = (index: number[]) => {
    if (plane.ndim < 2) {
      const n = index[0] ?? 0;
      look(plane.wrap ? Math.floor(n / plane.wrap) : 0, plane.wrap ? n % plane.wrap : n);
      return;
    }
    const rest = index.map((n, d) => [d, n] as const).filter(([d]) => d !== plane.row && d !== plane.col);
    const at = rest.map(([d, n]) => `${d}:${n}`).join(",") || undefined;
    go({ at, view: partText(around(index[plane.row!]!, index[plane.col!]!, size, { height: 470, width: 800 })) });
  };
  return (
    <article aria-label={`tensor ${shownName(name)}`}>
      <div class="tensor-head">
        <h2 class="mono">
          {shownTensor(name)} <CopyButton text={name} label="copy the name" />
        </h2>
        <span class="quiet">
          {facts.short} [{facts.shape.map(grouped).join(", ")}] · {counted(facts.numel, "element")} · {bytes(facts.nbytes)}
        </span>
        {choices.length > 1 && (
          <span role="group" aria-label="state">
            {choices.map((one) => (
              <button
                key={besideKey(one)}
                type="button"
                class="small"
                title={DERIVED[one.of]}
                aria-pressed={besideKey(one) === besideKey(facts)}
                onClick={() => show(one)}
              >
                {shownName(one.label)}
              </button>
            ))}
          </span>
        )}
        {api.live && choices.length > 1 && facts.numbers !== null && !empty && (
          <span role="group" aria-label="side by side" class="tensor-aside">
            <span class="quiet">side by side with</span>
            {choices.map((one) => besideKey(one) !== besideKey(facts) && (
              <button
                key={besideKey(one)}
                type="button"
                class="small"
                disabled={!one.fits}
                title={one.fits ? "the same rows and columns, in its own colours" : "has another shape"}
                aria-pressed={beside.some((other) => besideKey(other) === besideKey(one))}
                onClick={() => go({ beside: besideText(toggled(beside, one)) }, undefined, true)}
              >
                + {shownName(one.label)}
              </button>
            ))}
          </span>
        )}
      </div>
      {facts.problems.map((problem) => (
        <p class={problem.severity}>{problem.text}</p>
      ))}
      {facts.numbers === null ? (
        <p class="quiet">The elements are packed bits and not numbers, so there is no picture of them.</p>
      ) : empty ? (
        <p class="quiet">The tensor has no elements.</p>
      ) : (
        <Pictures key={`${plane.query.dims}/${plane.query.at}`} {...{ facts, plane, common, marks, lines, setLimits, beside, own }} />
      )}
      <Cards {...{ facts, plane, common, lines, jump, setMarks, empty: empty || facts.numbers === null }} part={part ?? whole(size)} size={size} live={api.live} />
    </article>
  );
}

export type Plane = ReturnType<typeof planeOf>;

interface PictureProps {
  facts: Facts;
  plane: Plane;
  common: Common;
  marks: Mark[];
  lines: Record<string, string>;
  /** Called with the ends of the colours, unless the line of Python finds them by itself. */
  setLimits(limits: string | undefined): void;
  /** Beside others: what the picture is called, and what moves it with them. */
  among?: { label: string; link: Link };
}

/** The picture of the tensor; or several of the same part, for each state that is chosen. */
function Pictures({ beside, own, ...first }: PictureProps & { beside: Choice[]; own: string | undefined }) {
  const { facts, plane } = first;
  const link = useMemo(() => new Link(), []);
  if (!beside.length) return <Picture {...first} />;
  const label = choicesOf(facts).find((one) => besideKey(one) === besideKey(facts))?.label ?? facts.state;
  return (
    <section aria-label="pictures side by side">
      <div class="tensor-tools">
        <Choices facts={facts} plane={plane} />
      </div>
      <div class="tensor-beside">
        <Picture key="first" {...first} among={{ label, link }} />
        {beside.map((one) => (
          <Beside key={besideKey(one)} shown={one} label={one.label} first={first} own={own} link={link} />
        ))}
      </div>
      <p class="quiet">The pictures show the same rows and columns. What follows is of {shownName(label)}.</p>
    </section>
  );
}

/** The picture of another state. */
function Beside({ shown, label, first, own, link }: { shown: Shown; label: string; first: PictureProps; own: string | undefined; link: Link }) {
  const { api, route } = useExplorer();
  const { params } = route;
  const common = { ...first.common, state: shown.state === own ? undefined : shown.state, of: shown.of || undefined };
  const loaded = useLoaded((signal) => api.json<Facts>("tensor", common, signal), [first.facts]);
  const [limits, setLimits] = useState<string>();
  const lines = useLines({ ...common, ...(api.live ? toldOf(params, limits) : {}) });
  const facts = loaded.value;
  const plane = useMemo(() => facts && planeOf(facts, params), [facts, params["dims"], params["at"]]);
  const all = first.plane.size;
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!facts || !plane) return <div class="tensor-wait quiet">Opening {shownName(label)} …</div>;
  if (facts.numbers === null || plane.size.height !== all.height || plane.size.width !== all.width) {
    return <div class="tensor-wait quiet">{shownName(label)} has other rows and columns.</div>;
  }
  return <Picture {...{ facts, plane, common, lines, setLimits }} marks={[]} among={{ label, link }} />;
}

/** How pictures are drawn, by the parameters of the link. */
function drawnAs(params: Record<string, string>, live: boolean) {
  const how = (live && ["mean", "min", "max", "absmax"].includes(params["how"] ?? "") ? params["how"] : "mean") as How;
  const kind = (["linear", "symlog", "quantile"].includes(params["scale"] ?? "") ? params["scale"] : "linear") as ScaleKind;
  const range: "full" | "robust" = params["range"] === "full" ? "full" : "robust";
  const exact = live && params["exact"] === "yes" ? "yes" : "auto";
  return { how, kind, range, exact };
}

function Picture({ facts, plane, common, marks, lines, among, setLimits }: PictureProps) {
  const { api, route, go } = useExplorer();
  const { params } = route;
  const { size } = plane;
  const { how, kind, range, exact } = drawnAs(params, api.live);
  const ask = async (tile: Tile, signal: AbortSignal, rows: number, cols: number, window: boolean): Promise<Values> => {
    const place = window ? { r0: tile.r0, r1: tile.r1, c0: tile.c0, c1: tile.c1 } : {};
    const { header, arrays } = await api.packed<{ exact: boolean; single: boolean; lost?: number }>(
      "tensor/tile", { ...common, ...plane.query, ...place, rows, cols, exact, ...(api.live ? {} : REPORTED) }, signal,
    );
    const mean = arrays["mean"] as Numbers;
    return { mean, min: arrays["min"] ?? mean, max: arrays["max"] ?? mean, nan: arrays["nan"], inf: arrays["inf"], ...header };
  };
  const everything = rootTile(size, LIVE);
  const first = api.live ? everything : { ...everything, rows: Math.min(REPORT, size.height), cols: Math.min(REPORT, size.width) };
  const root = useLoaded(
    // a report holds the answer to this one request
    (signal) => ask(first, signal, first.rows, first.cols, false),
    [facts, exact],
  );
  const layout = useLoaded((signal) => (api.holds("tensor/layout", common) ? api.json<Layout>("tensor/layout", common, signal) : Promise.resolve(null)), [facts]);
  const [wide, setWide] = useState(false); // whether norms are wanted that take long
  const cheap = facts.nbytes <= ALL;
  const norms = useLoaded(async (signal) => {
    if (!api.live || among || !(cheap || wide)) return null;
    const { arrays } = await api.packed("tensor/norms", { ...common, ...plane.query, rows: 512, cols: 512 }, signal);
    return arrays;
  }, [facts, wide]);
  const all = useMemo(() => root.value && seenOf([{ tile: first, values: root.value }], whole(size), how), [root.value, how]);
  const [seen, setSeen] = useState<Seen>();
  const cells = seen ?? all;
  const held = among || !api.live ? undefined : limitsOf(params["limits"]);
  const scale = useMemo(() => {
    const { values, low, high } = cells ?? NONE;
    const full: [number, number] = how === "absmax" ? [0, Math.max(-low, high)] : [low, high];
    if (held) return scaleOf(values, kind, "full", held);
    const found = scaleOf(values, kind, range, full, how === "absmax");
    return seen ? rounded(found, values) : found;
  }, [cells, kind, range, how, params["limits"]]);
  const limits = api.live && (seen || held) ? limitsText(scale) : undefined;
  useEffect(() => setLimits(limits), [limits]); // the line of Python has these colours
  const dark = useDark();
  const table = useMemo(() => colourTable(scale.signed ? (dark ? "signedDark" : "signed") : "viridis"), [scale.signed, dark]);
  const outlines = useMemo<Outline[] | undefined>(() => {
    const found = layout.value;
    if (!found || params["ranks"] === "no" || found.labels.length < 2 || plane.ndim !== 2) return undefined;
    if (found.row_dim !== 0 || found.col_dim !== 1) return undefined;
    return found.cells.map((cell) => ({
      rows: cell.rows, cols: cell.cols, label: found.labels[cell.holders[0]!]![0], group: cell.holders[0]!, missing: cell.missing,
    }));
  }, [layout.value, params["ranks"]]);
  const indexText = (row: number, col: number) => {
    if (plane.ndim === 0) return "[]";
    if (plane.ndim === 1) return `[${row * (plane.wrap ?? 0) + col}]`;
    const parts = Array.from({ length: plane.ndim }, (_, n) => (n === plane.row ? row : n === plane.col ? col : (plane.at.get(n) ?? ":")));
    return `[${parts.join(", ")}]`;
  };
  const pooled = Array.from({ length: plane.ndim }, (_, n) => n).filter((n) => n !== plane.row && n !== plane.col && !plane.at.has(n));
  const note = root.value && (
    <>
      {cells!.single ? "each element" : `${how} of each cell${api.live ? "" : ", of three digits"}`}
      {root.value.exact ? "" : ", of a sample of the elements"}
      {root.value.lost && <span class="error">; {counted(root.value.lost, "element")} {root.value.lost > 1 ? "are" : "is"} in lost files</span>}
      {plane.ndim > 2 && pooled.length > 0 && `, over ${pooled.length > 1 ? "dimensions" : "dimension"} ${pooled.join(", ")}`}
      {facts.dtype.includes("complex") && ", absolute values"}
      {norms.value && plane.ndim > 0 && "; bars are the L2 norms of rows and columns"}
    </>
  );
  return (
    <Figure of={facts.name} title={among ? shownName(among.label) : facts.of ? `Values of the ${facts.of === "update" ? "last step" : "change"}` : "Values"} note={note} name={among ? `${facts.name}.${among.label}` : `${facts.name}.values`} python={[lines["heatmap"], norms.value ? lines["norms"] : undefined]}>
      {!among && <div class="tensor-tools">
        <Choices facts={facts} plane={plane} />
        {api.live && kind !== "quantile" && (
          <label title="keep these colours while you zoom and move; else they follow what is in view">
            <input type="checkbox" checked={!!held} onChange={(event) => go({ limits: event.currentTarget.checked ? limitsText(scale) : undefined }, undefined, true)} />
            hold the colours
          </label>
        )}
        {layout.value && layout.value.labels.length > 1 && plane.ndim === 2 && (
          <label>
            <input type="checkbox" checked={params["ranks"] !== "no"} onChange={(event) => go({ ranks: event.currentTarget.checked ? undefined : "no" }, undefined, true)} />
            ranks
          </label>
        )}
        {api.live && !cheap && !norms.value && plane.ndim > 0 && (
          <button type="button" class="small" title="norms of rows and columns, beside the picture" onClick={() => setWide(!wide)}>
            {wide ? "Stop the norms" : `Norms in the margins (reads ${bytes(facts.nbytes)})`}
          </button>
        )}
        {norms.error && wide && <span class="error">{norms.error.message}</span>}
      </div>}
      {root.error ? (
        <Failure error={root.error} />
      ) : !root.value ? (
        <div class="tensor-wait quiet" style={{ minHeight: among ? "380px" : "520px" }}>
          reading {bytes(facts.nbytes)} …
        </div>
      ) : (
        <>
          <HeatMap
            key={exact} // tiles of samples are not those of everything
            size={size}
            first={first}
            root={root.value}
            most={LIVE}
            load={api.live ? (tile, signal) => ask(tile, signal, tile.rows, tile.cols, true) : undefined}
            how={how}
            scale={scale}
            table={table}
            part={partOf(params["view"])}
            onPart={(part) => go({ view: part && partText(part) }, undefined, true)}
            {...(api.live ? { onSeen: setSeen } : {})}
            label={`Heat map of ${among ? `${shownName(among.label)} of ` : ""}${shownName(facts.name)}, ${grouped(size.height)} by ${grouped(size.width)}, values ${shortNumber(all!.low)} to ${shortNumber(all!.high)}`}
            rowTitle={plane.row === null ? (plane.wrap ? `rows of ${grouped(plane.wrap)}` : "") : `dimension ${plane.row}`}
            colTitle={plane.col === null ? "" : `dimension ${plane.col}`}
            indexText={indexText}
            {...(among ? { link: among.link, height: 380 } : {})}
            outlines={outlines}
            marks={marks}
            rowNorms={norms.value?.["rows"]}
            colNorms={norms.value?.["cols"]}
          />
          {all!.values.length > 0 && (
            <Legend title={cells!.single ? "value" : how === "absmax" ? "largest |x|" : how} colour={(share) => css(table, share)} marks={marksOf(scale)} />
          )}
        </>
      )}
    </Figure>
  );
}

/** The controls of how pictures are drawn. */
function Choices({ facts, plane }: { facts: Facts; plane: Plane }) {
  const { api, route, go } = useExplorer();
  const { params } = route;
  const { size } = plane;
  const { how, kind, range, exact } = drawnAs(params, api.live);
  const heads = (facts.heads?.slices ?? []).map(([, a, b]) => {
    const all = whole(size);
    return partText(facts.heads!.dim === 0 ? { ...all, r0: a, r1: b } : { ...all, c0: a, c1: b });
  });
  const head = heads.indexOf(params["view"] ?? "");
  const option = (key: string, label: string, choices: [string, string][], now: string) => (
    <label>
      {label}
      <select value={now} onChange={(event) => go({ [key]: event.currentTarget.value === choices[0]![0] ? undefined : event.currentTarget.value, limits: undefined }, undefined, true)}>
        {choices.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
  return (
    <>
      {api.live && option("how", "cells show", [["mean", "mean"], ["absmax", "largest |x|"], ["min", "minimum"], ["max", "maximum"]], how)}
      {option("scale", "colours", [["linear", "linear"], ["symlog", "symmetric log"], ["quantile", "quantiles"]], kind)}
      {option("range", "range", [["robust", "99 % of cells"], ["full", "full"]], range)}
      {api.live && facts.nbytes > ALL &&
        option("exact", "reads", [["auto", "a sample"], ["yes", `everything (${bytes(facts.nbytes)})`]], exact)}
      {plane.ndim > 2 && api.live && <Dimensions plane={plane} />}
      {facts.heads && api.live && plane.ndim === 2 && (
        <label>
          attention
          <select
            value={params["view"] === undefined ? "" : head >= 0 ? String(head) : "-"}
            onChange={(event) => go({ view: heads[Number(event.currentTarget.value || NaN)] })}
          >
            <option value="">all heads</option>
            {params["view"] !== undefined && head < 0 && <option value="-">the part on screen</option>}
            {facts.heads.slices.map(([text, a, b], n) => (
              <option key={n} value={String(n)}>
                {text}: {a}–{b - 1}
              </option>
            ))}
          </select>
        </label>
      )}
    </>
  );
}

/** Which dimensions are rows and columns, and the index of each other one. */
function Dimensions({ plane }: { plane: Plane }) {
  const { go } = useExplorer();
  const choose = (row: number, col: number) => {
    const at = [...plane.at].filter(([d]) => d !== row && d !== col).map(([d, n]) => `${d}:${n}`).join(",");
    go({ dims: `${row},${col}`, at: at || undefined, view: undefined });
  };
  const select = (label: string, now: number, other: number, chosen: (n: number) => void): ComponentChildren => (
    <label>
      {label}
      <select value={String(now)} onChange={(event) => chosen(Number(event.currentTarget.value))}>
        {plane.shape.map((length, n) => n !== other && (
          <option key={n} value={String(n)}>
            {n} ({grouped(length)})
          </option>
        ))}
      </select>
    </label>
  );
  return (
    <>
      {select("rows: dimension", plane.row!, plane.col!, (n) => choose(n, plane.col!))}
      {select("columns: dimension", plane.col!, plane.row!, (n) => choose(plane.row!, n))}
      {plane.shape.map((length, d) => d !== plane.row && d !== plane.col && (
        <label key={d}>
          index of {d}
          <input
            type="number"
            min={0}
            max={length - 1}
            placeholder="all"
            value={plane.at.get(d) ?? ""}
            onChange={(event) => {
              const at = new Map(plane.at);
              const text = event.currentTarget.value;
              if (text === "") at.delete(d);
              else at.set(d, Math.min(length - 1, Math.max(0, Math.floor(Number(text)) || 0)));
              go({ at: [...at].map(([a, b]) => `${a}:${b}`).join(",") || undefined });
            }}
          />
        </label>
      ))}
    </>
  );
}
