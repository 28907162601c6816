// Quantities by kind of parameter and layer, as a grid whose rows have a scale each or one for all.

import { useMemo } from "preact/hooks";
import { useParam } from "../context";
import { Details } from "../ui/details";
import { Ending } from "../ui/ending";
import { colourTable, css } from "../ui/colours";
import { useDark } from "../ui/dark";
import { Figure } from "../ui/figure";
import { Grid } from "../ui/grid";
import { Python } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { shownName } from "../ui/text";
import { shortNumber } from "../ui/axis";

type Number = number | "NaN" | "Infinity" | "-Infinity";

export interface Layers {
  quantities: Record<string, string>;
  kinds: string[];
  labels: string[];
  layers: number[];
  values: Record<string, Number[][]>;
  /** Quantity, unless it is a share -> the values in a unit of each kind: see `Relative` of inspect/layers.py. */
  relative: Record<string, Relative>;
  alone: Record<string, Record<string, Number>>;
  marks: [string, number | null, string][];
}

interface Relative {
  unit: "median" | "largest";
  values: Number[][];
  limit: number;
}

interface Row {
  kind: string;
  layer: number | null;
  value: number;
  mark: string;
}

const VIRIDIS = colourTable("viridis");
const SIGNED = colourTable("signed"), DARK = colourTable("signedDark");

/** A grid of a quantity, and the same as a table. `id` stands for it in links. */
export function LayerGrid({ id, found, quantity, title, python, table, note }: { id: string; found: Layers; quantity: string; title: string; python: string | undefined; table?: string | undefined; note?: string }) {
  const [scale, setScale] = useParam(`scale.${id}`, "kind");
  const relative = scale === "kind" ? found.relative[quantity] : undefined;
  const own = relative && inUnits(relative);
  const dark = useDark();
  const rows = useMemo(() => rowsOf(found, quantity), [found, quantity]);
  const columns = useMemo(() => [...(Object.keys(found.alone[quantity]!).length ? ["none"] : []), ...found.layers.map(String)], [found, quantity]);
  const shift = columns[0] === "none" ? 1 : 0;
  const values = useMemo(() => gridOf(rows, found, columns.length, shift), [rows, found]);
  const scaled = useMemo(() => (relative ? ownGrid(relative, values, columns.length, shift) : values), [values, relative]);
  const marks = useMemo(() => new Map(found.marks.map(([kind, layer, mark]) => [`${kind} ${layer}`, mark])), [found]);
  const layerAt = (column: number) => (shift && column === 0 ? null : found.layers[column - shift]!);
  const what = found.quantities[quantity]!;
  const share = !(quantity in found.relative);
  const signed = Array.from(values).some((value) => value < 0);
  return (
    <>
      <Figure
        title={title}
        note={note ?? `${what}, by kind of parameter and layer`}
        name={`${quantity} by layer`}
        python={python}
        tools={
          !share && (
            <label>
              <input type="checkbox" checked={!!own} onChange={() => setScale(own ? "one" : "kind")} /> a scale for each row
            </label>
          )
        }
      >
        <Grid
          key={dark ? "dark" : "light"}
          rows={found.labels.map((label) => shownName(label, 40))}
          columns={columns.map((one) => (one === "none" ? "–" : one))}
          values={scaled}
          label={title}
          columnTitle={shift ? "layer (–: in no layer)" : "layer"}
          log={own ? own.log : !share && !signed}
          {...(own ? { range: own.range } : share ? { range: [0, 1] as [number, number] } : {})}
          colour={(at) => css(own ? (dark ? DARK : SIGNED) : VIRIDIS, at)}
          legend={own ? own.legend : what}
          detail={(row, column) => {
            const layer = layerAt(column);
            return `${shownName(found.kinds[row]!)}\n${layer === null ? "in no layer" : `layer ${layer}`}\n${what} ${text(values[row * columns.length + column]!)}${own ? own.detail(scaled[row * columns.length + column]!) : ""}`;
          }}
          mark={(row, column) => marks.get(`${found.kinds[row]} ${layerAt(column)}`) ?? ""}
        />
      </Figure>
      <Details id={id} summary="As a table">
        <DataTable id={id} columns={COLUMNS} rows={rows} caption={title} rowKey={({ kind, layer }) => `${kind} ${layer}`} height={320} />
        <Python code={table} />
      </Details>
    </>
  );
}

/** How values in a unit of each kind are drawn. */
function inUnits({ unit, limit }: Relative): { log: boolean; range: [number, number]; legend: string; detail(value: number): string } {
  if (unit === "largest") {
    return { log: false, range: [-limit, limit], legend: "share of the row's largest magnitude", detail: (value) => (globalThis.Number.isNaN(value) ? "" : `\n${shortNumber(value)} of the row's largest magnitude`) };
  }
  return { log: true, range: [2 ** -limit, 2 ** limit], legend: "multiple of the row's median", detail: (value) => (globalThis.Number.isNaN(value) ? "" : `\n${shortNumber(value)} times the row's median`) };
}
const COLUMNS: Column<Row>[] = [
  { key: "kind", title: "kind", value: ({ kind }) => kind, cell: ({ kind }) => <Ending text={kind} />, width: "minmax(240px,2fr)" },
  { key: "layer", title: "layer", number: true, value: ({ layer }) => layer, width: "80px" },
  { key: "value", title: "value", number: true, value: ({ value }) => value, cell: ({ value }) => text(value), width: "130px" },
  { key: "mark", title: "mark", value: ({ mark }) => mark, width: "50px" },
];

export function numeric(value: Number | null | undefined): number {
  return value === null || value === undefined ? NaN : typeof value === "number" ? value : globalThis.Number(value);
}

export function text(value: number): string {
  return globalThis.Number.isNaN(value) ? "–" : shortNumber(value);
}

function rowsOf(found: Layers, quantity: string): Row[] {
  const rows: Row[] = [];
  const marks = new Map(found.marks.map(([kind, layer, mark]) => [`${kind} ${layer}`, mark]));
  found.kinds.forEach((kind, n) => {
    const add = (layer: number | null, value: number) => rows.push({ kind, layer, value, mark: marks.get(`${kind} ${layer}`) ?? "" });
    if (kind in found.alone[quantity]!) add(null, numeric(found.alone[quantity]![kind]));
    found.layers.forEach((layer, k) => {
      const value = numeric(found.values[quantity]![n]![k]);
      if (!globalThis.Number.isNaN(value)) add(layer, value);
    });
  });
  return rows;
}

function gridOf(rows: Row[], found: Layers, width: number, shift: number): Float64Array {
  const values = new Float64Array(found.kinds.length * width).fill(NaN);
  const row = new Map(found.kinds.map((kind, n) => [kind, n]));
  const column = new Map(found.layers.map((layer, n) => [layer, n + shift]));
  for (const { kind, layer, value } of rows) values[row.get(kind)! * width + (layer === null ? 0 : column.get(layer)!)] = value;
  return values;
}

/**
 * The values in a unit of each kind, as a grid; a zero counts as the smallest number, which has the colour of the end.
 *
 * @param plain the grid of the values themselves: one that is in no layer is its kind's only one, and so its unit
 */
function ownGrid({ unit, values }: Relative, plain: Float64Array, width: number, shift: number): Float64Array {
  const found = new Float64Array(values.length * width).fill(NaN);
  values.forEach((row, n) => {
    const alone = plain[n * width]!;
    if (shift && globalThis.Number.isFinite(alone)) found[n * width] = unit === "largest" ? Math.sign(alone) : 1;
    row.forEach((one, k) => {
      const value = numeric(one);
      found[n * width + k + shift] = unit === "largest" ? value : Math.max(2 ** value, globalThis.Number.MIN_VALUE);
    });
  });
  return found;
}
