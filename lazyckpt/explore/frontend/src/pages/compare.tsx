// Two checkpoints, or two steps of a run, side by side: how far their tensors are apart, by layer and kind, and which names are not in both.

import { useMemo, useRef, useState } from "preact/hooks";
import { byCell, byKind, cellKey, farness, measured, type Difference, type Fold, type Measure } from "../compare/fold";
import { useDifferences, type Compared, type Pair, type Progress } from "../compare/load";
import { DifferencePicture } from "../compare/picture";
import { DifferenceTree, kindText, relativeText } from "../compare/tree";
import { useExplorer, useLoaded } from "../context";
import { ComparedSteps } from "../parts/steps";
import { shortNumber } from "../ui/axis";
import { Ending } from "../ui/ending";
import { colourTable, css } from "../ui/colours";
import { keysOf, textOf } from "../tree/keys";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { Grid } from "../ui/grid";
import { LineChart } from "../ui/line";
import { Python, useLines } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { bytes, counted, grouped, shownName } from "../ui/text";
import "./compare.css";

const ASKED = 2 * 2 ** 30; // bytes of both checkpoints that are read without being asked for
const CIVIDIS = colourTable("cividis");
const MEASURES: Record<Measure, string> = { relative: "‖a − b‖ / ‖a‖", angle: "1 − cosine" };

export function ComparePage() {
  const { api, about, route, go } = useExplorer();
  const { state, name, measure: asked, list = "folded" } = route.params;
  const measure: Measure = asked === "angle" ? "angle" : "relative";
  const isRun = about.kind === "run";
  const [step, other] = isRun ? [route.params["step"], route.params["with"]] : [];
  const loaded = useLoaded(async (signal) => {
    const pair = { state, step, with: other };
    return { pair, found: await api.json<Compared>("compare", pair, signal) };
  }, [state, step, other]);
  const { pair, found } = loaded.value ?? {}; // those before, until the new ones are here
  const [started, setStarted] = useState<Pair>(); // the two whose elements are wanted though there are many
  const progress = useDifferences(api, pair, found, !!found && (pair === started || !api.live || found.nbytes <= ASKED));
  const { open = "" } = route.params; // kinds that are unfolded
  const unfolded = useMemo(() => keysOf(open), [open]);
  const picture = useRef<HTMLDivElement>(null);
  const kinds = useMemo(() => byKind(progress.rows), [progress.rows]);
  const cells = useMemo(() => byCell(progress.rows), [progress.rows]);
  const lines = useLines({ state, step, with: other });
  const steps = isRun && <ComparedSteps />;
  if (loaded.error) return <div>{steps}<Failure error={loaded.error} /></div>;
  if (!found || !pair) return <div>{steps}<p class="quiet">Comparing names …</p></div>;
  const colour = colourOf(kinds);
  const choose = (row: Difference | undefined) => {
    if (!row || !isDrawn(row)) return;
    go({ name: row.name, view: undefined, at: undefined, dims: undefined }, undefined, true);
    setTimeout(() => picture.current?.scrollIntoView({ block: "nearest" }));
  };
  const chosen = name !== undefined && progress.rows.some((row) => row.name === name && isDrawn(row)) ? name : undefined;
  return (
    <div class="compare">
      {steps}
      <Summary {...{ found, progress, start: () => setStarted(pair) }} />
      {progress.error && <Failure error={progress.error} />}
      {progress.rows.length > 0 && (
        <>
          <Figure
            title="By layer and kind"
            name="comparison"
            note={measure === "relative" ? "norm of the difference / norm in A; of several tensors the root mean square" : "1 minus the cosine of the angle; of several tensors the largest"}
            tools={
              <span role="group" aria-label="measure" class="choices">
                {(Object.keys(MEASURES) as Measure[]).map((one) => (
                  <button key={one} type="button" class="small" aria-pressed={one === measure} onClick={() => go({ measure: one === "relative" ? undefined : one }, undefined, true)}>
                    {MEASURES[one]}
                  </button>
                ))}
              </span>
            }
            python={lines["grid"]}
          >
            <Cells {...{ found, cells, measure, choose }} />
          </Figure>
          <Curves {...{ found, cells, measure, choose }} python={lines["curves"]} />
          <section>
            <div class="compare-title">
              <h2>Tensors</h2>
              <span role="group" aria-label="list" class="choices">
                {["folded", "all"].map((one) => (
                  <button key={one} type="button" class="small" aria-pressed={one === list} onClick={() => go({ list: one === "folded" ? undefined : one }, undefined, true)}>
                    {one}
                  </button>
                ))}
              </span>
              <span class="quiet">A click on a tensor draws its difference.</span>
            </div>
            {list === "all" ? (
              <DataTable
                id="differences"
                caption="differences"
                columns={COLUMNS}
                rows={progress.rows}
                rowKey={(row) => row.name}
                sort={{ key: "relative", down: true }}
                onRow={(row) => choose(row)}
                active={chosen}
                height={420}
              />
            ) : (
              <DifferenceTree
                kinds={found.kinds}
                folds={kinds}
                open={new Set(found.kinds.flatMap((kind, n) => (unfolded.has(kind) ? n : [])))}
                onOpen={(kind, now) => {
                  const others = [...unfolded].filter((one) => one !== found.kinds[kind]);
                  go({ open: textOf(now ? [...others, found.kinds[kind]!] : others) }, undefined, true);
                }}
                active={chosen}
                onName={choose}
                colour={colour}
              />
            )}
          </section>
          <Python code={lines["differences"]} />
          <div ref={picture}>{chosen !== undefined && <DifferencePicture name={chosen} pair={pair} steps={found.steps} />}</div>
        </>
      )}
      {found.changed_in_all > 0 && (
        <section>
          <h2>Names, dtypes and shapes that differ</h2>
          <DataTable
            id="changed"
            caption="changed"
            columns={CHANGED}
            rows={found.changed}
            rowKey={([name, status]) => `${status} ${name}`}
            height={320}
            note={found.changed_in_all > found.changed.length ? `the first ${grouped(found.changed.length)} of ${grouped(found.changed_in_all)}` : undefined}
          />
        </section>
      )}
    </div>
  );
}

/** Whether there is a picture of a difference: both have the tensor, in one shape. */
function isDrawn({ status }: Difference): boolean {
  return ["values", "dtype", "equal"].includes(status);
}

const SAID: [string, string][] = [
  ["dtype", "of another dtype"],
  ["shape", "of another shape"],
  ["only in a", "only in A"],
  ["only in b", "only in B"],
  ["unreadable", "unreadable"],
];

function Summary({ found, progress, start }: { found: Compared; progress: Progress; start(): void }) {
  const { api } = useExplorer();
  const equal = progress.rows.filter(({ status }) => status === "equal").length;
  const values = progress.rows.filter(({ status }) => status === "values").length;
  const parts = [
    ...(progress.done ? [`${grouped(equal)} of ${grouped(progress.done)} tensors are equal`, ...(values ? [`${grouped(values)} have other values`] : [])] : [counted(found.names, "name")]),
    ...SAID.filter(([key]) => found.counts[key]).map(([key, text]) => `${grouped(found.counts[key]!)} ${text}`),
  ];
  const left = found.names - progress.done;
  return (
    <div class="compare-summary">
      <p role="status">
        <strong>{parts.join(" · ")}</strong>
        {progress.reading && <span class="quiet"> reading: {grouped(progress.done)} of {grouped(found.names)} …</span>}
      </p>
      {found.prefix && (
        <p class="quiet">
          {grouped(found.prefix[1])} names of one checkpoint begin with <code>{shownName(found.prefix[0])}</code> in the other: view.rename or view.select makes them alike.
        </p>
      )}
      {!progress.reading && left > 0 && !progress.error && (
        api.live ? (
          progress.done === 0 && found.nbytes > ASKED && (
            <p>
              <button type="button" onClick={start}>
                Compare the values: reads {bytes(found.nbytes)}
              </button>
            </p>
          )
        ) : (
          <p class="quiet">This report holds the values of {grouped(progress.done)} of {grouped(found.names)} tensors.</p>
        )
      )}
      {progress.reading && <progress max={found.names} value={progress.done} aria-label="tensors compared" />}
    </div>
  );
}

/** Colours of relative differences, on a logarithmic scale over all kinds. */
function colourOf(kinds: Map<number, Fold>): (relative: number) => string {
  const values = [...kinds.values()].flatMap(({ rows }) => rows.flatMap(({ relative }) => relative || []));
  const low = Math.log(values.reduce((a, b) => Math.min(a, b), Infinity));
  const high = Math.log(values.reduce((a, b) => Math.max(a, b), -Infinity));
  return (relative) => css(CIVIDIS, high > low ? (Math.log(relative) - low) / (high - low) : 0.5);
}

interface Part {
  found: Compared;
  cells: Map<string, Fold>;
  measure: Measure;
  choose(row: Difference | undefined): void;
}

function Cells({ found, cells, measure, choose }: Part) {
  const alone = [...cells.keys()].some((key) => key.endsWith("/"));
  const layers: (number | null)[] = [...(alone ? [null] : []), ...found.layers];
  const kinds = found.kinds.map((_, kind) => kind).filter((kind) => layers.some((layer) => cells.has(cellKey({ kind, layer }))));
  const at = (r: number, c: number) => cells.get(cellKey({ kind: kinds[r]!, layer: layers[c]! }));
  const values = Float64Array.from(kinds.flatMap((_, r) => layers.map((_, c) => measured(at(r, c), measure))));
  const said = kinds.some((_, r) => layers.some((_, c) => at(r, c)?.odd)) || values.some((value) => value > 0);
  if (!said) return <p class="quiet">All tensors that are compared are equal: there is no difference to draw.</p>;
  return (
    <>
      <Grid
        rows={kinds.map((kind) => shownName(found.labels[kind]!, 34))}
        columns={layers.map((layer) => (layer === null ? "–" : String(layer)))}
        values={values}
        label={`${MEASURES[measure]} by kind and layer`}
        columnTitle={alone ? "layer (–: in no layer)" : "layer"}
        colour={(share) => css(CIVIDIS, share)}
        log
        legend={MEASURES[measure]}
        mark={(r, c) => (at(r, c)?.odd ? "?" : "")}
        onCell={(r, c) => choose(at(r, c)?.worst)}
        detail={(r, c) => {
          const fold = at(r, c);
          const title = `${shownName(found.kinds[kinds[r]!]!)}${layers[c] === null ? "" : `, layer ${layers[c]}`}`;
          if (!fold) return `${title}\nnot compared`;
          if (fold.equal === fold.rows.length) return `${title}\nequal`;
          const { relative, cosine, max_abs, worst } = fold;
          return [
            title,
            ...(relative === null ? [kindText(worst)] : [`relative difference ${shortNumber(relative)}`]),
            ...(cosine === null ? [] : [`cosine ${cosine}`]),
            ...(max_abs === null ? [] : [`largest difference ${shortNumber(max_abs)}`]),
          ].join("\n");
        }}
      />
      <p class="quiet compare-note" data-legend>Blank: equal, or nothing to compare. ?: a tensor that one side lacks, that has another shape, or that cannot be read.</p>
    </>
  );
}

function Curves({ found, cells, measure, python, choose }: Part & { python: string | undefined }) {
  const series = useMemo(() => {
    return found.kinds.flatMap((_, kind) => {
      const layers = found.layers.filter((layer) => cells.has(cellKey({ kind, layer })));
      const y = layers.map((layer) => measured(cells.get(cellKey({ kind, layer })), measure) || NaN);
      return layers.length > 1 && y.some(Number.isFinite) ? [{ name: found.labels[kind]!, x: layers, y, kind }] : [];
    });
  }, [found, cells, measure]);
  if (!series.length) return null;
  return (
    <Figure title="By layer" name="comparison.layers" note="a line for each kind; layers that are equal leave gaps" python={python}>
      <LineChart
        series={series}
        label={`${MEASURES[measure]} by layer`}
        xLabel="layer"
        yLabel={MEASURES[measure]}
        log
        height={300}
        onPoint={(one, index) => {
          const { kind, x } = one as (typeof series)[number];
          choose(cells.get(cellKey({ kind, layer: x[index]! }))?.worst);
        }}
      />
    </Figure>
  );
}

const COLUMNS: Column<Difference>[] = [
  { key: "name", title: "tensor", value: (row) => row.name, cell: (row) => <Ending text={row.name} />, width: "minmax(260px,2fr)" },
  { key: "layer", title: "layer", number: true, value: (row) => row.layer, width: "70px" },
  {
    key: "relative", title: "relative", number: true, hint: "the norm of the difference divided by the norm in A",
    value: (row) => (row.relative === null && farness(row) < 0 ? null : farness(row)), cell: (row) => relativeText(row),
  },
  { key: "cosine", title: "cosine", number: true, value: (row) => row.cosine, cell: (row) => (row.cosine === null ? "" : row.cosine.toPrecision(9)) },
  { key: "max", title: "largest |a − b|", number: true, value: (row) => row.max_abs, cell: (row) => (row.max_abs === null ? "" : shortNumber(row.max_abs)), width: "120px" },
  { key: "count", title: "elements", hint: "elements that differ", number: true, value: (row) => row.count },
  { key: "norm_a", title: "norm in A", number: true, value: (row) => row.norm_a, cell: (row) => (row.norm_a === null ? "" : shortNumber(row.norm_a)) },
  { key: "norm_b", title: "norm in B", number: true, value: (row) => row.norm_b, cell: (row) => (row.norm_b === null ? "" : shortNumber(row.norm_b)) },
  { key: "what", title: "what differs", value: (row) => kindText(row), width: "minmax(170px,1fr)" },
];

const CHANGED: Column<Compared["changed"][number]>[] = [
  { key: "name", title: "name", value: ([name]) => name, cell: ([name]) => <Ending text={name} />, width: "minmax(260px,2fr)" },
  { key: "what", title: "what", value: ([, status]) => status, width: "110px" },
  { key: "a", title: "in A", value: ([, , a]) => a, cell: ([, , a]) => <span class="mono">{shownName(a ?? "–")}</span> },
  { key: "b", title: "in B", value: ([, , , b]) => b, cell: ([, , , b]) => <span class="mono">{shownName(b ?? "–")}</span> },
];
