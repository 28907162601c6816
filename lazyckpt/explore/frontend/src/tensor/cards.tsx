// What the values of a tensor are, and where they lie: a card for each.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { useExplorer, useLoaded, useParam } from "../context";
import type { Plane } from "../pages/tensor";
import { shortNumber } from "../ui/axis";
import { Details } from "../ui/details";
import { Ending } from "../ui/ending";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import type { Mark } from "../ui/heatmap";
import { Histogram } from "../ui/histogram";
import { LineChart } from "../ui/line";
import { type Part, type Size } from "../ui/pyramid";
import { Python, useLines } from "../ui/python";
import { DataTable } from "../ui/table";
import { bytes, counted, grouped, shownName } from "../ui/text";

export interface Facts {
  name: string;
  shape: number[];
  dtype: string;
  short: string;
  nbytes: number;
  numel: number;
  numbers: number[] | null;
  wrap: number | null;
  bits: boolean;
  spectrum: boolean;
  state: string;
  states: { name: string; short: string; shape: number[] }[];
  /** "" for the tensor itself; else what of it is shown, one of `derived`. */
  of: string;
  derived: { of: string; label: string }[];
  owner: string | null;
  about: [string, string][];
  ranges: { path: string; rank: string; offset: number | null; nbytes: number; runs: number; packed: string; missing: string }[];
  ranges_in_all: number;
  problems: { severity: string; text: string }[];
  heads: { dim: number; slices: [string, number, number][] } | null;
}

type Common = Record<string, string | undefined>;

interface Props {
  facts: Facts;
  plane: Plane;
  common: Common;
  lines: Record<string, string>;
  part: Part;
  size: Size;
  empty: boolean;
  live: boolean;
  jump(index: number[]): void;
  setMarks(marks: Mark[]): void;
}

const OUTLIERS = 50; // elements that are listed
const AUTO = 64 << 20; // bytes that are read without being asked to

export function Cards(props: Props) {
  const { facts, common, empty, live } = props;
  const { api } = useExplorer();
  return (
    <div class="tensor-cards">
      {!empty && <HistogramCard {...props} />}
      {!empty && api.holds("tensor/outliers", { ...common, count: OUTLIERS }) && <OutlierCard {...props} />}
      {!empty && facts.bits && api.holds("tensor/bits", common) && <div class="tensor-tall"><BitsCard {...props} /></div>}
      {!empty && facts.spectrum && api.holds("tensor/spectrum", spectrumOf(props)) && <SpectrumCard {...props} />}
      {!empty && live && EMBEDDING.test(facts.name) && facts.shape.length === 2 && <NeighbourCard {...props} />}
      {!empty && api.holds("tensor/values", windowOf(props).params) && <ValuesCard {...props} />}
      <WhereCard {...props} />
    </div>
  );
}

/** Loads at once what is cheap; of the rest, says what it reads, and waits for a click. */
function Wait<T>({ cost, cheap, load, children }: { cost: string; cheap: boolean; load(signal: AbortSignal): Promise<T>; children(value: T): ComponentChildren }) {
  const [wanted, setWanted] = useState(cheap);
  const found = useLoaded((signal) => (wanted ? load(signal) : Promise.resolve(undefined)), [wanted]);
  if (found.error) return <Failure error={found.error} />;
  if (found.value !== undefined) return <>{children(found.value as T)}</>;
  return (
    <div class="tensor-wait quiet">
      {wanted ? (
        <span role="status">
          reading …{" "}
          <button type="button" class="small" onClick={() => setWanted(false)}>
            stop
          </button>
        </span>
      ) : (
        <button type="button" class="small" onClick={() => setWanted(true)}>
          compute ({cost})
        </button>
      )}
    </div>
  );
}

interface Counts {
  edges: number[];
  counts: number[];
  [key: string]: number | string | boolean | number[];
}

const SUMMARY: [string, string][] = [
  ["min", "min"], ["max", "max"], ["mean", "mean"], ["std", "std"], ["l2", "L2 norm"], ["zeros", "zeros"], ["nan", "NaN"], ["posinf", "+Inf"], ["neginf", "−Inf"],
];

function HistogramCard({ facts, common, lines, live }: Props) {
  const { api, route, go } = useExplorer();
  const powers = live && route.params["bins"] === "log";
  const log = route.params["counts"] === "log";
  const exact = live && route.params["exact"] === "yes" ? "yes" : "auto";
  const { value, error } = useLoaded(
    (signal) => api.json<Counts>("tensor/histogram", { ...common, bins: 100, scale: powers ? "log" : "linear", exact }, signal),
    [facts, powers, exact],
  );
  const toggle = (key: string, on: boolean, text: string) => (
    <button type="button" class="small" aria-pressed={on} onClick={() => go({ [key]: on ? undefined : "log" }, undefined, true)}>
      {text}
    </button>
  );
  return (
    <Figure
      title="Histogram"
      of={facts.name}
      note={value ? (value["exact"] ? "all elements" : `a sample of ${grouped(Number(value["read"]))} elements`) : ""}
      name={`${facts.name}.histogram`}
      python={lines["histogram"]}
      tools={
        <>
          {toggle("counts", log, "log counts")}
          {live && toggle("bins", powers, "powers of 2")}
        </>
      }
    >
      {error ? (
        <Failure error={error} />
      ) : !value ? (
        <div class="tensor-wait quiet">reading …</div>
      ) : (
        <>
          <Histogram edges={value.edges} counts={value.counts} log={log} even={value["scale"] === "log"} label={`histogram of ${shownName(facts.name)}`} xLabel="value" yLabel="elements in a bin" />
          <dl class="tensor-facts" style={{ gridTemplateColumns: "repeat(3, max-content 1fr)" }}>
            {SUMMARY.map(([key, title]) => [<dt key={key}>{title}</dt>, <dd key={`${key}v`}>{number(value[key])}</dd>])}
          </dl>
        </>
      )}
    </Figure>
  );
}

function number(value: unknown): string {
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) && Math.abs(value) < 1e15 ? grouped(value) : shortNumber(value);
}

interface Outliers {
  largest: [number[], number | string][];
  odd: [number[], number | string][];
  nan: number;
  posinf: number;
  neginf: number;
}

function OutlierCard({ facts, plane, common, lines, jump, setMarks }: Props) {
  const { api } = useExplorer();
  const load = (signal: AbortSignal) => api.json<Outliers>("tensor/outliers", { ...common, count: OUTLIERS }, signal);
  return (
    <section aria-label="Outliers">
      <h2>Largest elements, NaN and infinities</h2>
      <Wait cost={`reads ${bytes(facts.nbytes)}`} cheap={facts.nbytes <= AUTO} load={load}>
        {(found) => <OutlierTable {...{ found, plane, jump, setMarks }} name={facts.name} />}
      </Wait>
      <Python code={lines["outliers"]} />
    </section>
  );
}

function OutlierTable({ name, found, plane, jump, setMarks }: { name: string; found: Outliers; plane: Plane; jump(index: number[]): void; setMarks(marks: Mark[]): void }) {
  const rows = [...found.odd.map(([index, value]) => ({ index, value, odd: true })), ...found.largest.map(([index, value]) => ({ index, value, odd: false }))];
  useEffect(() => {
    const marks: Mark[] = [];
    for (const { index, value, odd } of rows.slice(0, 70)) {
      if ([...plane.at].some(([d, n]) => index[d] !== n)) continue;
      const n = index[0] ?? 0;
      const [row, col] =
        plane.ndim < 2 ? (plane.wrap ? [Math.floor(n / plane.wrap), n % plane.wrap] : [0, n]) : [index[plane.row!]!, index[plane.col!]!];
      marks.push({ row, col, odd, label: `${odd ? "not finite" : "among the largest"}: [${index.join(", ")}] ${value}` });
    }
    setMarks(marks.filter((mark, n) => mark.odd || n < found.odd.length + 10));
  }, [found, plane]);
  const odd = [found.nan && `${grouped(found.nan)} NaN`, found.posinf && `${grouped(found.posinf)} +Inf`, found.neginf && `${grouped(found.neginf)} −Inf`].filter(Boolean);
  return (
    <DataTable
      id="outliers"
      caption="largest elements"
      file={`${name}.largest`}
      rows={rows}
      rowKey={({ index, odd }) => `${odd}${index.join(",")}`}
      height={300}
      note={odd.length ? odd.join(", ") : "no NaN, no infinities"}
      onRow={({ index }) => jump(index)}
      columns={[
        { key: "index", title: "index", value: ({ index }) => `[${index.join(", ")}]`, width: "1fr" },
        { key: "value", title: "value", value: ({ value }) => value, cell: ({ value, odd }) => <span class={odd ? "error" : undefined}>{typeof value === "number" ? sevenDigits(value) : value}</span>, number: true, width: "140px" },
      ]}
    />
  );
}

/** A number with seven significant digits. */
function sevenDigits(value: number): string {
  return Math.abs(value) >= 1e9 ? value.toExponential(6).replace("e+", "e") : String(Number(value.toPrecision(7)));
}

interface Bits {
  sign: number;
  exponent: number;
  mantissa: number;
  bias: number;
  ones: number[];
  exponents: number[] | null;
  distinct: number;
  entropy: number;
}

function BitsCard({ facts, common, lines }: Props) {
  const { api } = useExplorer();
  return (
    <Figure title="Bits" of={facts.name} note="how often each bit is 1, and each exponent" name={`${facts.name}.bits`} python={lines["bits"]}>
      <Wait cost={`reads ${bytes(facts.nbytes)}`} cheap={facts.nbytes <= AUTO} load={(signal) => api.json<Bits>("tensor/bits", common, signal)}>
        {(found) => <BitsPicture found={found} facts={facts} />}
      </Wait>
    </Figure>
  );
}

function BitsPicture({ found, facts }: { found: Bits; facts: Facts }) {
  const names = found.ones.map((_, n) =>
    n < found.sign ? "sign" : n < found.sign + found.exponent ? `e${found.sign + found.exponent - 1 - n}` : `${found.exponent ? "m" : "b"}${found.ones.length - 1 - n}`,
  );
  const seen = found.exponents?.map((n, e) => [e, n] as const).filter(([, n]) => n > 0);
  const first = seen?.[0]?.[0] ?? 0;
  const last = seen?.[seen.length - 1]?.[0] ?? 0;
  const shown = found.exponents?.slice(first, last + 1);
  return (
    <>
      <p class="quiet">
        {grouped(found.distinct)} of {grouped(2 ** found.ones.length)} bit patterns occur; their entropy is {found.entropy.toFixed(2)} bits.
      </p>
      {shown ? (
        <Histogram
          even
          edges={Array.from({ length: shown.length + 1 }, (_, n) => n)}
          counts={shown}
          names={shown.map((_, n) => `2^${first + n - found.bias}`)}
          label={`exponents of ${shownName(facts.name)}`}
          xLabel="exponent"
          yLabel="elements"
          height={200}
        />
      ) : null}
      {shown && (
        <Details id="exponents" summary="The exponents as a table">
          <DataTable
            id="exponents"
            caption="exponents"
            file={`${facts.name}.exponents`}
            rows={shown.map((count, n) => ({ exponent: first + n - found.bias, count }))}
            rowKey={({ exponent }) => exponent}
            height={190}
            columns={[
              { key: "exponent", title: "power of 2", value: ({ exponent }) => exponent, number: true, width: "110px" },
              { key: "count", title: "elements", value: ({ count }) => count, number: true },
            ]}
          />
        </Details>
      )}
      <DataTable
        id="bits"
        caption="share of ones in each bit"
        file={`${facts.name}.bits`}
        rows={found.ones.map((share, n) => ({ share, bit: names[n]! }))}
        rowKey={({ bit }) => bit}
        height={190}
        columns={[
          { key: "bit", title: "bit", value: ({ bit }) => bit, width: "70px" },
          { key: "share", title: "ones", value: ({ share }) => share, cell: ({ share }) => `${(100 * share).toFixed(2)} %`, number: true },
          { key: "bar", title: "", picture: true, value: ({ share }) => share, cell: ({ share }) => <div class="tensor-bar"><span style={{ left: 0, width: `${100 * share}%` }} /></div>, width: "1fr" },
        ]}
      />
    </>
  );
}

function spectrumOf({ common, plane }: Pick<Props, "common" | "plane">) {
  return { ...common, dims: plane.query.dims, at: plane.query.at };
}

function SpectrumCard({ facts, plane, common, lines }: Props) {
  const { api } = useExplorer();
  const side = plane.ndim >= 2 ? Math.min(plane.size.height, plane.size.width) : 0;
  const free = plane.ndim - 2 - plane.at.size;
  return (
    <Figure title="Singular values" of={facts.name} note="largest first" name={`${facts.name}.singular-values`} python={lines["spectrum"]}>
      {free > 0 ? (
        <p class="quiet">Choose an index of each dimension that is not drawn: singular values are of a matrix.</p>
      ) : (
        <Wait
          key={plane.query.at}
          cost={`reads ${bytes(facts.nbytes)}, and takes the eigenvalues of ${grouped(side)} x ${grouped(side)}`}
          cheap={facts.nbytes <= AUTO / 4 && side <= 512}
          load={(signal) => api.json<{ values: number[]; accuracy: number }>("tensor/spectrum", spectrumOf({ common, plane }), signal)}
        >
          {({ values, accuracy }) => (
            <>
              <LineChart series={[{ name: "singular values", x: values.map((_, n) => n + 1), y: values }]} label={`singular values of ${shownName(facts.name)}`} xLabel="number" yLabel="singular value" log={values[values.length - 1]! > 0} height={240} />
              <p class="quiet">Values below {shortNumber(accuracy)} are noise.</p>
            </>
          )}
        </Wait>
      )}
    </Figure>
  );
}

const EMBEDDING = /embed|wte|lm_head|output_layer|word_embeddings/;

interface Nearest {
  row: number;
  token: string | null;
  nearest: [number, number, string | null][];
}

function NeighbourCard({ facts, common, part, jump }: Props) {
  const { api } = useExplorer();
  const [said, say] = useParam("near", ""); // a row or a token, whose nearest rows are shown
  const [typed, setTyped] = useState<string>();
  const text = typed ?? (said || String(Math.max(0, Math.floor(part.r0))));
  const [wanted, setWanted] = useState(facts.nbytes <= AUTO);
  const asked = useMemo(() => (!said || !wanted ? undefined : /^\d+$/.test(said) ? { row: Number(said) } : { token: said }), [said, wanted]);
  const found = useLoaded(
    (signal) => (asked ? api.json<Nearest>("tensor/neighbours", { ...common, ...asked, count: 50 }, signal) : Promise.resolve(undefined)),
    [facts, asked],
  );
  const told = useLines({ ...common, row: found.value?.row });
  const shown = (token: string | null) => (token === null ? "" : shownName(token));
  return (
    <section aria-label="Nearest rows">
      <h2>Nearest rows</h2>
      <form
        class="tensor-tools"
        onSubmit={(event) => {
          event.preventDefault();
          setWanted(true);
          say(text);
        }}
      >
        <label>
          row or token
          <input class="field" value={text} onInput={(event) => setTyped(event.currentTarget.value)} />
        </label>
        <button type="submit" class="small">
          find (reads {bytes(facts.nbytes)})
        </button>
        {asked && found.loading && <span role="status">reading …</span>}
      </form>
      {found.error ? (
        <Failure error={found.error} />
      ) : found.value ? (
        <DataTable
          id="nearest"
          caption="nearest rows"
          file={`${facts.name}.nearest`}
          rows={found.value.nearest}
          rowKey={([row]) => row}
          height={300}
          note={`by cosine to row ${grouped(found.value.row)} ${shown(found.value.token)}`}
          onRow={([row]) => jump([row, 0])}
          columns={[
            { key: "row", title: "row", value: ([row]) => row, number: true },
            { key: "token", title: "token", value: ([, , token]) => token ?? "", cell: ([, , token]) => <code>{shown(token)}</code>, width: "1fr" },
            { key: "cosine", title: "cosine", value: ([, cosine]) => cosine, cell: ([, cosine]) => cosine.toFixed(4), number: true },
          ]}
        />
      ) : null}
      {found.value && <Python code={told["neighbours"]} />}
    </section>
  );
}

const ROWS = 60;
const COLS = 12;

/** The elements that the table shows: the upper left of the picture; in a report, where only those are, of the whole. */
function windowOf({ plane, common, part, size, live }: Pick<Props, "plane" | "common" | "part" | "size" | "live">) {
  const [top, left] = live ? [Math.floor(part.r0), Math.floor(part.c0)] : [0, 0];
  const [r0, c0] = [Math.min(Math.max(0, top), size.height - 1), Math.min(Math.max(0, left), size.width - 1)];
  const window = { r0, r1: Math.min(size.height, r0 + ROWS), c0, c1: Math.min(size.width, c0 + COLS) };
  return { r0, c0, window, params: { ...common, ...plane.query, ...window } };
}

function ValuesCard(props: Props) {
  const { facts, plane, lines, live } = props;
  const { api } = useExplorer();
  const { r0, c0, window, params } = windowOf(props);
  const free = plane.ndim > 2 && plane.at.size < plane.ndim - 2;
  const { value, error } = useLoaded(
    (signal) => (free ? Promise.resolve(null) : api.json<{ values: string[][] }>("tensor/values", params, signal)),
    [facts, r0, c0, plane.query.at, plane.query.dims],
  );
  const longest = value?.values.reduce((n, row) => row.reduce((m, text) => Math.max(m, text.length), n), 0) ?? 0;
  const wide = Math.max(108, Math.ceil(8.6 * longest)); // no digit is cut off
  return (
    <section class="tensor-wide" aria-label="Values as a table">
      <h2>{plane.ndim < 2 && !plane.wrap ? `Values from index ${grouped(c0)}` : `Values from row ${grouped(r0)}, column ${grouped(c0)}`}</h2>
      {free ? (
        <p class="quiet">Choose an index of each dimension that is not drawn.</p>
      ) : error ? (
        <Failure error={error} />
      ) : !value ? (
        <div class="tensor-wait quiet">reading …</div>
      ) : (
        <DataTable
          id="values"
          caption="values"
          file={`${facts.name}.values`}
          rows={value.values.map((texts, n) => ({ texts, row: r0 + n }))}
          rowKey={({ row }) => row}
          height={330}
          note={live ? "the upper left of what the picture shows; zoom or move it" : "the upper left"}
          columns={[
            { key: "row", title: "row", value: ({ row }) => row, number: true, width: "80px" },
            ...Array.from({ length: window.c1 - window.c0 }, (_, n) => ({
              key: `c${n}`, title: grouped(c0 + n), value: ({ texts }: { texts: string[]; row: number }) => texts[n] ?? "", number: true, width: `minmax(${wide}px,1fr)`,
            })),
          ]}
        />
      )}
      <Python code={lines["values"]} />
    </section>
  );
}

type Range = Props["facts"]["ranges"][number] & { n: number };

function WhereCard({ facts }: Props) {
  const end = new Map<string, number>();
  for (const { path, offset, nbytes } of facts.ranges) end.set(path, Math.max(end.get(path) ?? 1, (offset ?? 0) + nbytes));
  if (!facts.owner && !facts.about.length && !facts.ranges.length) return null; // it has no bytes
  return (
    <section class="tensor-wide" aria-label="Where its bytes lie">
      <h2>Where its bytes lie</h2>
      <dl class="tensor-facts">
        {facts.owner && [<dt key="o">tied to</dt>, <dd key="ov">{shownName(facts.owner)}</dd>]}
        {facts.about.map(([label, text]) => [<dt key={label}>{label}</dt>, <dd key={`${label}v`}>{text}</dd>])}
      </dl>
      {facts.ranges.length > 0 && (
        <DataTable
          id="ranges"
          caption="ranges of files"
          file={`${facts.name}.ranges`}
          rows={facts.ranges.map((range, n) => ({ ...range, n }))}
          rowKey={({ n }) => n}
          height={300}
          note={facts.ranges_in_all > facts.ranges.length ? `the first of ${grouped(facts.ranges_in_all)} ranges` : `${counted(facts.ranges.length, "range")} of files`}
          columns={[
            // ranges of files that name no rank have the file's name instead of one
            ...(facts.ranges.some(({ rank, path }) => !path.endsWith(rank)) ? [{ key: "rank", title: "rank", value: ({ rank }: Range) => rank, width: "minmax(110px,1fr)" }] : []),
            { key: "path", title: "file", value: ({ path }) => path, cell: ({ path }) => <Ending text={path} />, width: "minmax(180px,2fr)" },
            { key: "offset", title: "offset", value: ({ offset }) => offset, number: true },
            { key: "nbytes", title: "bytes", value: ({ nbytes }) => nbytes, number: true },
            { key: "bar", title: "in the file", picture: true, value: ({ offset }) => offset, width: "minmax(120px,1fr)",
              cell: ({ path, offset, nbytes, missing }) =>
                missing ? <span class="error">{missing}</span> : <div class="tensor-bar"><span style={{ left: `${(100 * (offset ?? 0)) / end.get(path)!}%`, width: `${(100 * nbytes) / end.get(path)!}%` }} /></div> },
          ]}
        />
      )}
    </section>
  );
}
