// The experts of a mixture-of-experts model: norms, dead ones, and how alike they are.

import { useMemo } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import { Ask } from "../parts/ask";
import { numeric, text } from "../parts/layergrid";
import { colourTable, css } from "../ui/colours";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { Grid } from "../ui/grid";
import { pyText } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { bytes, grouped, shownName } from "../ui/text";
import { useDark } from "./tensor";

interface Experts {
  layers: string[];
  experts: number[];
  norms: (number | string)[][];
  marks: [string, number, string][];
  dead: [string, number][];
}

interface Likeness {
  layer: string;
  experts: number[];
  cosines: (number | string)[][];
  exact: boolean;
  read: number;
  nbytes: number;
}

interface Row {
  layer: string;
  expert: number;
  norm: number;
  mark: string;
}

const VIRIDIS = colourTable("viridis");
const SIGNED = colourTable("signed"), DARK = colourTable("signedDark");

export function ExpertsPage() {
  const { about } = useExplorer();
  return (
    <Ask reads={about.sides[0]!.nbytes} what="the norms of the experts">
      {() => <Norms />}
    </Ask>
  );
}

function Norms() {
  const { api, route, go } = useExplorer();
  const { state, step, side } = route.params;
  const { value, error } = useLoaded((signal) => api.json<Experts>("experts", { state, step, side }, signal), [state, step, side]);
  const rows = useMemo(() => (value ? rowsOf(value) : []), [value]);
  if (error) return <Failure error={error} />;
  if (!value) return <p class="quiet">Reading the experts …</p>;
  const width = value.experts.length;
  const norms = Float64Array.from(rows, ({ norm }) => norm);
  const layer = route.params["layer"] ?? value.layers[0]!;
  return (
    <>
      <Figure title="Norms of the experts" note="L2 norm of all tensors of an expert; a click compares the experts of a layer" name="norms of experts" python="view.plot.experts()">
        <Grid
          numbers={(norm) => norm.toPrecision(3)}
          rows={value.layers.map((one) => shownName(one))}
          columns={value.experts.map(String)}
          values={norms}
          label="Norms of the experts"
          rowTitle="layer"
          columnTitle="expert"
          colour={(at) => css(VIRIDIS, at)}
          legend="L2 norm"
          detail={(row, column) => `layer ${shownName(value.layers[row]!)}, expert ${value.experts[column]}\nL2 norm ${text(norms[row * width + column]!)}`}
          mark={(row, column) => rows[row * width + column]!.mark}
          active={value.layers.includes(layer) ? [value.layers.indexOf(layer), -1] : null}
          onCell={(row) => go({ layer: value.layers[row]! }, undefined, true)}
        />
      </Figure>
      <p class="quiet">{value.dead.length ? `${grouped(value.dead.length)} experts are dead: all their elements are zero (marked 0).` : "No expert is all zero."}</p>
      <LikenessOf layer={layer} />
      <details>
        <summary>As a table</summary>
        <DataTable columns={COLUMNS} rows={rows} caption="experts" rowKey={({ layer, expert }) => `${layer} ${expert}`} height={320} />
      </details>
    </>
  );
}

function LikenessOf({ layer }: { layer: string }) {
  const { api, route } = useExplorer();
  const { state, step, side } = route.params;
  const dark = useDark();
  const { value, error } = useLoaded((signal) => api.json<Likeness>("experts/likeness", { layer, state, step, side }, signal), [layer, state, step, side]);
  if (error) return <Failure error={error} />;
  if (!value) return <p class="quiet">Comparing the experts of layer {shownName(layer)} …</p>;
  const values = Float64Array.from(value.cosines.flat(), (one) => numeric(one as number));
  const width = value.experts.length;
  for (let n = 0; n < width; n += 1) values[n * width + n] = NaN; // an expert is like itself
  const most = Math.max(...Array.from(values, Math.abs).filter((one) => !Number.isNaN(one)), 1e-6);
  const how = value.exact ? "all elements" : `sampled: ${bytes(value.read)} of ${bytes(value.nbytes)}`;
  return (
    <Figure title={`How alike the experts of layer ${shownName(value.layer)} are`} note={`cosine of the angle between two experts; ${how}`} name={`likeness of experts in layer ${value.layer}`} python={`lazyckpt.inspect.expert_likeness.expert_likeness(view, ${/^\d+$/.test(value.layer) ? value.layer : pyText(value.layer)})`}>
      <Grid
        numbers={(cosine) => cosine.toFixed(3)}
        rows={value.experts.map(String)}
        columns={value.experts.map(String)}
        values={values}
        range={[-most, most]}
        label={`How alike the experts of layer ${shownName(value.layer)} are`}
        rowTitle="expert"
        columnTitle="expert"
        key={dark ? "dark" : "light"}
        colour={(at) => css(dark ? DARK : SIGNED, at)}
        legend="cosine"
        detail={(row, column) => `experts ${value.experts[row]} and ${value.experts[column]}\ncosine ${row === column ? "1" : text(values[row * width + column]!)}`}
      />
    </Figure>
  );
}

const COLUMNS: Column<Row>[] = [
  { key: "layer", title: "layer", value: ({ layer }) => (/^\d+$/.test(layer) ? Number(layer) : layer), cell: ({ layer }) => shownName(layer), width: "1fr" },
  { key: "expert", title: "expert", number: true, value: ({ expert }) => expert, width: "80px" },
  { key: "norm", title: "L2 norm", number: true, value: ({ norm }) => norm, cell: ({ norm }) => text(norm), width: "130px" },
  { key: "mark", title: "", value: ({ mark }) => mark, width: "60px" },
];

function rowsOf(found: Experts): Row[] {
  const marks = new Map(found.marks.map(([layer, expert, mark]) => [`${layer} ${expert}`, mark]));
  for (const [layer, expert] of found.dead) marks.set(`${layer} ${expert}`, "0");
  return found.layers.flatMap((layer, row) =>
    found.experts.map((expert, column) => ({ layer, expert, norm: numeric(found.norms[row]![column] as number), mark: marks.get(`${layer} ${expert}`) ?? "" })),
  );
}
