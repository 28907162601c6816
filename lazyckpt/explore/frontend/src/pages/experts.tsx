// The experts of a mixture-of-experts model: norms, dead ones, and how alike they are.

import { useMemo, useState } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import { cellsOf, TWINS, useNearest, type Cell, type ExpertLayers } from "../experts/nearest";
import { Ask } from "../parts/ask";
import { numeric, text } from "../parts/layergrid";
import { colourTable, css } from "../ui/colours";
import { useDark } from "../ui/dark";
import { Details } from "../ui/details";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { Grid } from "../ui/grid";
import { Python, useLines } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { bytes, counted, grouped, shownName } from "../ui/text";

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

const CELLS: Record<string, string> = { norm: "L2 norm", nearest: "largest cosine to another expert" };

export function ExpertsPage() {
  const { api, about, route, go } = useExplorer();
  const { state, step, side } = route.params;
  const shown = about.sides[side === "b" ? 1 : 0] ?? about.sides[0]!;
  const nearest = route.params["cells"] === "nearest";
  if (!shown.experts) return <p class="quiet">This checkpoint has no experts.</p>;
  return (
    <>
      {api.holds("experts/layers", { state, step, side }) && (
        <p role="group" aria-label="cells" class="choices">
          {Object.entries(CELLS).map(([one, text]) => (
            <button key={one} type="button" class="small" aria-pressed={nearest === (one === "nearest")} onClick={() => go({ cells: one === "nearest" ? one : undefined }, undefined, true)}>
              {text}
            </button>
          ))}
        </p>
      )}
      {nearest ? (
        <MostAlike key={`${state} ${step} ${side}`} />
      ) : (
        <Ask key={`${state} ${step} ${side}`} reads={shown.nbytes} what="the norms of the experts">
          {() => <Norms />}
        </Ask>
      )}
    </>
  );
}

/** The layer whose experts are compared: that of the link, or the first one. */
function layerOf(layers: string[] | undefined, asked: string | undefined): string | undefined {
  return asked !== undefined && layers?.includes(asked) ? asked : layers?.[0];
}

const LITTLE = 1 << 30; // bytes that are read without being asked for

/** The largest cosine of each expert to another one of its layer. */
function MostAlike() {
  const { api, route, go } = useExplorer();
  const { state, step, side } = route.params;
  const view = { state, step, side };
  const { value: listed, error } = useLoaded((signal) => api.json<ExpertLayers>("experts/layers", view, signal), [state, step, side]);
  const [asked, setAsked] = useState<boolean | undefined>(undefined);
  const reads = listed?.reads.reduce((a, b) => a + b, 0) ?? 0;
  const wanted = asked ?? (!api.live || reads <= LITTLE);
  const progress = useNearest(api, view, listed, wanted);
  const cells = useMemo(() => (listed ? cellsOf(listed, progress) : []), [listed, progress]);
  const layer = layerOf(listed?.layers, route.params["layer"]);
  const lines = useLines({ ...view, layer });
  if (error) return <Failure error={error} />;
  if (!listed) return <p class="quiet">Listing the experts …</p>;
  const done = progress.found.size + progress.failed.size;
  const all = listed.layers.length;
  const width = listed.experts.length;
  const twins = cells.filter(({ mark }) => mark === "=").length;
  const sampled = [...progress.found.values()].some(({ exact }) => !exact);
  return (
    <>
      <Figure
        title="The most alike expert"
        note={<>largest cosine of the angles to the other experts of the layer; {sampled ? "evenly spaced rows of large layers" : "all elements"}<span data-hint>; a click compares the experts of a layer</span></>}
        name="most alike experts"
        python={lines["alike"]}
        tools={
          api.live && done < all && (
            <span class="quiet">
              {progress.reading && <progress max={all} value={done} aria-label="layers compared" />} {grouped(done)} of {grouped(all)} layers{" "}
              <button type="button" class="small" onClick={() => setAsked(!wanted)}>
                {wanted ? "stop" : done ? "go on" : `compare: reads ${bytes(reads)}`}
              </button>
            </span>
          )
        }
      >
        <Grid
          rows={listed.layers.map((one) => shownName(one))}
          columns={listed.experts.map(String)}
          values={Float64Array.from(cells, ({ cosine }) => cosine)}
          label="Largest cosine to another expert"
          rowTitle="layer"
          columnTitle="expert"
          colour={(at) => css(VIRIDIS, at)}
          legend="cosine"
          detail={(row, column) => {
            const { layer, expert, nearest, cosine, mark } = cells[row * width + column]!;
            const what = nearest !== null ? `cosine ${text(cosine)} to expert ${nearest}` : mark === "?" ? progress.failed.get(layer)! : progress.found.has(layer) ? "zero, or not finite" : "not compared";
            return `layer ${shownName(layer)}, expert ${expert}\n${what}`;
          }}
          mark={(row, column) => cells[row * width + column]!.mark}
          active={layer === undefined ? null : [listed.layers.indexOf(layer), -1]}
          onCell={(row) => go({ layer: listed.layers[row]! }, undefined, true)}
        />
      </Figure>
      {progress.error && <Failure error={progress.error} />}
      <p class="quiet" role="status">
        {twins ? `${counted(twins, "expert")} ${twins === 1 ? "has" : "have"} a cosine above ${TWINS} to another (marked =).` : done ? `${done < all ? "So far no" : "No"} expert has a cosine above ${TWINS} to another.` : ""}
        {done > 0 && done < all && ` ${grouped(all - done)} layers are not compared${api.live ? "" : ": this report does not hold them"}.`}
      </p>
      {[...progress.failed].slice(0, 1).map(([layer, why]) => (
        <p key={layer} class="warning">
          {shownName(why, 500)} {progress.failed.size > 1 && `(and ${grouped(progress.failed.size - 1)} more layers)`}
        </p>
      ))}
      {!progress.reading && layer !== undefined && progress.found.has(layer) && <LikenessOf layer={layer} python={lines["likeness"]} />}
      <Details id="alike" summary="As a table">
        <DataTable id="alike" columns={ALIKE} rows={cells} caption="most alike experts" rowKey={({ layer, expert }) => `${layer} ${expert}`} height={320} />
        <Python code={lines["nearest"]} />
      </Details>
    </>
  );
}

const layerColumn = <R extends { layer: string }>(): Column<R> => ({
  key: "layer", title: "layer", value: ({ layer }) => (/^\d+$/.test(layer) ? Number(layer) : layer), cell: ({ layer }) => shownName(layer), width: "1fr",
});

const ALIKE: Column<Cell>[] = [
  layerColumn<Cell>(),
  { key: "expert", title: "expert", number: true, value: ({ expert }) => expert, width: "80px" },
  { key: "nearest", title: "most alike", number: true, value: ({ nearest }) => nearest, width: "110px" },
  { key: "cosine", title: "cosine", number: true, value: ({ cosine }) => (Number.isNaN(cosine) ? null : cosine), cell: ({ cosine }) => text(cosine), width: "130px" },
  { key: "mark", title: "mark", value: ({ mark }) => mark, width: "60px" },
];

function Norms() {
  const { api, route, go } = useExplorer();
  const { state, step, side } = route.params;
  const { value, error } = useLoaded((signal) => api.json<Experts>("experts", { state, step, side }, signal), [state, step, side]);
  const rows = useMemo(() => (value ? rowsOf(value) : []), [value]);
  const layer = layerOf(value?.layers, route.params["layer"]);
  const lines = useLines({ state, step, side, layer });
  if (error) return <Failure error={error} />;
  if (!value) return <p class="quiet">Reading the experts …</p>;
  const width = value.experts.length;
  const norms = Float64Array.from(rows, ({ norm }) => norm);
  return (
    <>
      <Figure title="Norms of the experts" note={<>L2 norm of all tensors of an expert<span data-hint>; a click compares the experts of a layer</span></>} name="norms of experts" python={lines["experts"]}>
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
          active={layer === undefined ? null : [value.layers.indexOf(layer), -1]}
          onCell={(row) => go({ layer: value.layers[row]! }, undefined, true)}
        />
      </Figure>
      <p class="quiet">{value.dead.length ? `${counted(value.dead.length, "expert")} ${value.dead.length === 1 ? "is" : "are"} dead: all elements are zero (marked 0).` : "No expert is all zero."}</p>
      {layer !== undefined && <LikenessOf layer={layer} python={lines["likeness"]} />}
      <Details id="norms" summary="As a table">
        <DataTable id="norms" columns={COLUMNS} rows={rows} caption="experts" rowKey={({ layer, expert }) => `${layer} ${expert}`} height={320} />
        <Python code={lines["norms"]} />
      </Details>
    </>
  );
}

function LikenessOf({ layer, python }: { layer: string; python: string | undefined }) {
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
    <Figure title={`How alike the experts of layer ${shownName(value.layer)} are`} note={`cosine of the angle between two experts; ${how}`} name={`likeness of experts in layer ${value.layer}`} python={python}>
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
  layerColumn<Row>(),
  { key: "expert", title: "expert", number: true, value: ({ expert }) => expert, width: "80px" },
  { key: "norm", title: "L2 norm", number: true, value: ({ norm }) => norm, cell: ({ norm }) => text(norm), width: "130px" },
  { key: "mark", title: "mark", value: ({ mark }) => mark, width: "60px" },
];

function rowsOf(found: Experts): Row[] {
  const marks = new Map(found.marks.map(([layer, expert, mark]) => [`${layer} ${expert}`, mark]));
  for (const [layer, expert] of found.dead) marks.set(`${layer} ${expert}`, "0");
  return found.layers.flatMap((layer, row) =>
    found.experts.map((expert, column) => ({ layer, expert, norm: numeric(found.norms[row]![column] as number), mark: marks.get(`${layer} ${expert}`) ?? "" })),
  );
}
