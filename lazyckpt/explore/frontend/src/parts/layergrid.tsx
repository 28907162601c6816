// Quantities by kind of parameter and layer, as a grid whose rows have a scale each or one for all.

import { useMemo, useState } from "preact/hooks";
import { Ending } from "../ui/ending";
import { colourTable, css } from "../ui/colours";
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
  alone: Record<string, Record<string, Number>>;
  marks: [string, number | null, string][];
}

interface Row {
  kind: string;
  layer: number | null;
  value: number;
  mark: string;
}

const VIRIDIS = colourTable("viridis");

/** A grid of a quantity, and the same as a table. */
export function LayerGrid({ found, quantity, title, python, table, note }: { found: Layers; quantity: string; title: string; python: string | undefined; table?: string | undefined; note?: string }) {
  const [own, setOwn] = useState(true);
  const rows = useMemo(() => rowsOf(found, quantity), [found, quantity]);
  const columns = useMemo(() => [...(Object.keys(found.alone[quantity]!).length ? ["none"] : []), ...found.layers.map(String)], [found, quantity]);
  const shift = columns[0] === "none" ? 1 : 0;
  const values = useMemo(() => gridOf(rows, found, columns.length, shift), [rows, found]);
  const scaled = useMemo(() => (own ? byRow(values, columns.length) : values), [values, own]);
  const marks = useMemo(() => new Map(found.marks.map(([kind, layer, mark]) => [`${kind} ${layer}`, mark])), [found]);
  const layerAt = (column: number) => (shift && column === 0 ? null : found.layers[column - shift]!);
  const what = found.quantities[quantity]!;
  const share = SHARES.has(quantity);
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
              <input type="checkbox" checked={own} onChange={() => setOwn(!own)} /> a scale for each row
            </label>
          )
        }
      >
        <Grid
          rows={found.labels.map((label) => shownName(label, 40))}
          columns={columns.map((one) => (one === "none" ? "–" : one))}
          values={share ? values : scaled}
          label={title}
          columnTitle="layer"
          log={!share && !own}
          {...(share ? { range: [0, 1] as [number, number] } : {})}
          colour={(at) => css(VIRIDIS, at)}
          legend={share ? what : own ? "share of the row's largest" : what}
          detail={(row, column) => {
            const layer = layerAt(column);
            return `${shownName(found.kinds[row]!)}\n${layer === null ? "in no layer" : `layer ${layer}`}\n${what} ${text(values[row * columns.length + column]!)}`;
          }}
          mark={(row, column) => marks.get(`${found.kinds[row]} ${layerAt(column)}`) ?? ""}
        />
      </Figure>
      <details>
        <summary>As a table</summary>
        <DataTable columns={COLUMNS} rows={rows} caption={title} rowKey={({ kind, layer }) => `${kind} ${layer}`} height={320} />
        <Python code={table} />
      </details>
    </>
  );
}

const SHARES = new Set(["zeros", "nan", "inf"]);

const COLUMNS: Column<Row>[] = [
  { key: "kind", title: "kind", value: ({ kind }) => kind, cell: ({ kind }) => <Ending text={kind} />, width: "minmax(240px,2fr)" },
  { key: "layer", title: "layer", number: true, value: ({ layer }) => layer, width: "80px" },
  { key: "value", title: "value", number: true, value: ({ value }) => value, cell: ({ value }) => text(value), width: "130px" },
  { key: "mark", title: "", value: ({ mark }) => mark, width: "50px" },
];

export function numeric(value: Number | null | undefined): number {
  return value === null || value === undefined ? NaN : typeof value === "number" ? value : globalThis.Number(value);
}

export function text(value: number): string {
  return Number.isNaN(value) ? "–" : shortNumber(value);
}

function rowsOf(found: Layers, quantity: string): Row[] {
  const rows: Row[] = [];
  const marks = new Map(found.marks.map(([kind, layer, mark]) => [`${kind} ${layer}`, mark]));
  found.kinds.forEach((kind, n) => {
    const add = (layer: number | null, value: number) => rows.push({ kind, layer, value, mark: marks.get(`${kind} ${layer}`) ?? "" });
    if (kind in found.alone[quantity]!) add(null, numeric(found.alone[quantity]![kind]));
    found.layers.forEach((layer, k) => {
      const value = numeric(found.values[quantity]![n]![k]);
      if (!Number.isNaN(value)) add(layer, value);
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

function byRow(values: Float64Array, width: number): Float64Array {
  const scaled = values.slice();
  for (let at = 0; at < values.length; at += width) {
    let largest = 0;
    for (let n = at; n < at + width; n += 1) if (Number.isFinite(values[n]!)) largest = Math.max(largest, Math.abs(values[n]!));
    for (let n = at; n < at + width; n += 1) scaled[n] = largest ? Math.abs(values[n]!) / largest : values[n]!;
  }
  return scaled;
}
