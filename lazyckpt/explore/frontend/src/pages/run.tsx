// A training run: norms, updates and drift by layer over its steps, a small picture for each kind of parameter.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import { shortNumber } from "../ui/axis";
import { colourTable, css } from "../ui/colours";
import { useDark } from "../ui/dark";
import { CompareWith, showStep } from "../parts/steps";
import { Failure } from "../ui/failure";
import { Figure, SaveButtons } from "../ui/figure";
import { LegendOf } from "../ui/grid";
import { LineChart, type Series } from "../ui/line";
import { Python, useLines } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { bytes, capital, grouped, newId, shownName } from "../ui/text";
import "./compare.css";
import "./run.css";

interface Kind {
  kind: string;
  label: string;
  layers: number;
  tensors: number;
  nbytes: number;
  first: string;
}

interface Run {
  steps: number[];
  quantities: [string, string][];
  twice: string[];
  kinds: Kind[];
}

interface Course {
  label: string;
  steps: number[];
  layers: number[];
  values: (number | null)[][];
  alone: (number | null)[] | null;
  errors: Record<string, string>;
  /** What is odd at some layers and steps: "?" is a tensor that cannot be read, "!" one with NaN or infinite elements. */
  marks: [layer: number | null, step: number, mark: string][];
}

const ASKED = 2 ** 30; // bytes of a kind, at all steps, that are read without being asked for
const FIRST = ["norm", "growth", "change", "drift", "cosine", "towards"]; // the quantities that stand first
const LOG = new Set(["change", "drift"]);
const MARKED = [["?", "Not every tensor can be read, or compared, at"], ["!", "There are NaN or infinite elements at"]] as const;
const VIRIDIS = colourTable("viridis");

export function RunPage() {
  const context = useExplorer();
  const { api, about, route, go } = context;
  const { state, quantity = "norm", kind, q = "" } = route.params;
  const [ticks] = useState(() => newId("steps"));
  const step = route.params["step"] ?? String(about.steps[about.steps.length - 1]);
  const loaded = useLoaded((signal) => api.json<Run>("run", { state, step: api.live ? route.params["step"] : undefined }, signal), [state, route.params["step"]]);
  const found = loaded.value;
  const lines = useLines({ state, quantity: quantity === "norm" ? undefined : quantity, kind, q: kind ? undefined : q });
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!found) return <p class="quiet">Opening the steps …</p>;
  const place = Math.max(0, found.steps.indexOf(Number(step)));
  const known = new Map(found.quantities);
  const names = [...FIRST.filter((one) => known.has(one)), ...[...known.keys()].filter((one) => !FIRST.includes(one))];
  const label = known.get(quantity) ?? quantity;
  const chosen = found.kinds.find((one) => one.kind === kind);
  const shown = found.kinds.filter((one) => one.kind.includes(q));
  return (
    <div class="run">
      <div class="run-tools">
        <label class="run-slider">
          step
          <input
            type="range"
            min={0}
            max={found.steps.length - 1}
            value={place}
            list={ticks}
            aria-valuetext={`step ${grouped(found.steps[place]!)}`}
            onChange={(event) => showStep(context, found.steps[Number(event.currentTarget.value)]!)}
          />
          <datalist id={ticks}>
            {found.steps.length <= 60 && found.steps.map((_, n) => <option key={n} value={String(n)} />)}
          </datalist>
          <output>{grouped(found.steps[place]!)}</output>
          <span class="quiet">
            {place + 1} of {grouped(found.steps.length)}
          </span>
        </label>
        <CompareWith step={found.steps[place]!} />
        <label>
          quantity
          <select value={quantity} onChange={(event) => go({ quantity: event.currentTarget.value === "norm" ? undefined : event.currentTarget.value }, undefined, true)}>
            {names.map((one) => (
              <option key={one} value={one}>
                {known.get(one)}
              </option>
            ))}
          </select>
        </label>
        <label>
          kinds
          <input type="search" value={q} placeholder="part of a name" onInput={(event) => go({ q: event.currentTarget.value || undefined }, undefined, true)} />
        </label>
      </div>
      {chosen ? (
        <One key={`${chosen.kind} ${quantity} ${state}`} {...{ run: found, kind: chosen, quantity, label, step: found.steps[place]!, lines }} />
      ) : (
        <>
          <h2>{capital(label)}</h2>
          <p class="quiet">
            A picture for each kind of parameter, a line for each layer. Only pictures in view are read. A click shows one kind alone.
          </p>
          <Layers kinds={shown} />
          <div class="run-panels">
            {shown.map((one) => (
              <Panel key={`${one.kind} ${quantity} ${state}`} {...{ run: found, kind: one, quantity, label, step: found.steps[place]! }} />
            ))}
          </div>
          {!shown.length && <p class="quiet">No kind has this in its name.</p>}
          <Python code={lines["dynamics"]} />
        </>
      )}
    </div>
  );
}

/** Says which colour is which layer. */
function Layers({ kinds }: { kinds: Kind[] }) {
  const shade = useShade();
  const most = kinds.reduce((n, { layers }) => Math.max(n, layers), 0);
  if (most < 2) return null;
  return (
    <div class="run-layers">
      <LegendOf low={0} high={most - 1} colour={shade} format={(n) => (Number.isInteger(n) ? String(n) : "")} title="layers, first to last" />
    </div>
  );
}

/** The colour of a layer by its place among all: not too bright on white paper, nor too dark on black. */
function useShade(): (share: number) => string {
  const dark = useDark();
  return (share) => css(VIRIDIS, dark ? 0.25 + 0.75 * share : 0.85 * share);
}

function reads(run: Run, kind: Kind, quantity: string): number {
  return kind.nbytes * run.steps.length * (run.twice.includes(quantity) ? 2 : 1);
}

interface PartProps {
  run: Run;
  kind: Kind;
  quantity: string;
  label: string;
  step: number;
}

function useCourse({ run, kind, quantity }: PartProps, seen: boolean) {
  const { api, route } = useExplorer();
  const { state } = route.params;
  const size = reads(run, kind, quantity);
  const [wanted, setWanted] = useState(false);
  const start = seen && (wanted || !api.live || size <= ASKED);
  const loaded = useLoaded(
    (signal) => (start ? api.json<Course>("run/course", { kind: kind.kind, quantity, state }, signal) : Promise.resolve(undefined)),
    [kind.kind, quantity, state, start],
  );
  return { loaded, size, start, ask: () => setWanted(true) };
}

function seriesOf(course: Course): Series[] {
  const lines = course.values.map((y, n) => ({ name: `layer ${course.layers[n]}`, x: course.steps, y: y.map((one) => one ?? NaN) }));
  const drawn = lines.filter(({ y }) => y.some(Number.isFinite));
  return course.alone ? [...drawn, { name: "in no layer", x: course.steps, y: course.alone.map((one) => one ?? NaN) }] : drawn;
}

/** One kind as a small picture; its values are read when it comes into view. */
function Panel(props: PartProps) {
  const { kind, quantity, label, step } = props;
  const context = useExplorer();
  const { go } = context;
  const box = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState(false);
  const shade = useShade();
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setSeen(entries[entries.length - 1]!.isIntersecting), { rootMargin: "120px" });
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);
  const had = useRef(false);
  const { loaded, size, start, ask } = useCourse(props, seen || had.current);
  had.current ||= !!loaded.value; // what is read stays; reading ends when the picture leaves the view
  const series = useMemo(() => (loaded.value ? seriesOf(loaded.value) : []), [loaded.value]);
  return (
    <div class="run-panel" ref={box}>
      <div class="run-head">
        <button type="button" class="run-name mono" title={shownName(kind.kind)} onClick={() => go({ kind: kind.kind })}>
          {shownName(kind.label, 60)}
        </button>
        {loaded.value && loaded.value.marks.length > 0 && (
          <span class="warning" title="some tensors cannot be read or compared, or have NaN or infinite elements: the page of this kind lists them">
            {[...new Set(loaded.value.marks.map(([, , mark]) => mark))].join(" ")}
          </span>
        )}
        {loaded.value && <SaveButtons of={box} name={`${kind.label}.${quantity}`} head={() => [capital(label), shownName(kind.kind)]} {...(series.length > 1 ? { legend: ".run-layers [data-legend]" } : {})} />}
      </div>
      {loaded.error ? (
        <p class="quiet">{loaded.error.message}</p>
      ) : loaded.value && LOG.has(quantity) && series.length > 0 && series.every(({ y }) => Array.from(y).every((one) => !(one > 0))) ? (
        <p class="run-wait quiet">no change</p>
      ) : loaded.value ? (
        <LineChart
          series={series}
          label={`${label} of ${shownName(kind.kind)}`}
          xLabel="step"
          yLabel=""
          log={LOG.has(quantity)}
          height={190}
          mark={step}
          colours={series.map((_, n) => shade(series.length > 1 ? n / (series.length - 1) : 0.5))}
          legend={false}
          onPoint={(one, index) => showStep(context, one.x[index]!)}
        />
      ) : seen && !start ? (
        <p class="run-wait">
          <button type="button" class="small" onClick={ask}>
            read {bytes(size)}
          </button>
        </p>
      ) : (
        <p class="run-wait quiet">{seen ? `reading ${bytes(size)} …` : ""}</p>
      )}
    </div>
  );
}

interface Row {
  layer: number | null;
  name: string;
  value: number;
  first: number;
  values: number[];
}

/** One kind alone: its curves, and its values at the chosen step. */
function One(props: PartProps & { lines: Record<string, string> }) {
  const { kind, quantity, label, step, lines } = props;
  const context = useExplorer();
  const { go } = context;
  const { loaded, size, start, ask } = useCourse(props, true);
  const shade = useShade();
  const found = loaded.value;
  const series = useMemo(() => (found ? seriesOf(found) : []), [found]);
  const colours = series.map((_, n) => shade(series.length > 1 ? n / (series.length - 1) : 0.5));
  const at = found ? found.steps.indexOf(step) : -1;
  const rows: Row[] = series.map(({ name, y }) => ({ name, layer: /^layer /.test(name) ? Number(name.slice(6)) : null, value: at >= 0 ? y[at]! : NaN, first: y[0]!, values: [...(y as number[])] }));
  const number = (key: "value" | "first", title: string): Column<Row> => ({
    key, title, number: true, width: "150px",
    value: (row) => (Number.isNaN(row[key]) ? null : row[key]),
    cell: (row) => (Number.isNaN(row[key]) ? "" : shortNumber(row[key])),
  });
  const columns: Column<Row>[] = [
    { key: "name", title: "layer", value: (row) => row.layer, cell: (row) => row.name },
    number("value", `at step ${grouped(step)}`),
    number("first", `at step ${grouped(found?.steps[0] ?? 0)}`),
  ];
  const errors = Object.entries(found?.errors ?? {});
  const marks = found?.marks ?? [];
  return (
    <>
      <p>
        <button type="button" class="small" onClick={() => go({ kind: undefined })}>
          ← all kinds
        </button>{" "}
        <button type="button" class="small" onClick={() => go({ name: kind.first }, "tensor")}>
          the first tensor at this step
        </button>
      </p>
      <Figure title={capital(label)} name={`${kind.label}.${quantity}`} note={<span class="mono">{shownName(kind.kind)}</span>} python={lines["dynamics"]}>
        {loaded.error ? (
          <Failure error={loaded.error} />
        ) : found ? (
          <>
          <LineChart
            series={series}
            label={`${label} of ${shownName(kind.kind)}`}
            xLabel="step"
            yLabel={label}
            log={LOG.has(quantity)}
            height={320}
            mark={step}
            colours={colours}
            legend={series.length <= 12}
            onPoint={(one, index) => showStep(context, one.x[index]!)}
          />
          {series.length > 12 && <Layers kinds={[kind]} />}
          </>
        ) : start ? (
          <p class="run-wait quiet">reading {bytes(size)} …</p>
        ) : (
          <p class="run-wait">
            <button type="button" onClick={ask}>
              read {bytes(size)}
            </button>
          </p>
        )}
      </Figure>
      {MARKED.map(([mark, text]) => {
        const here = marks.filter(([, , one]) => one === mark);
        return here.length > 0 && (
          <p key={mark} class="warning">
            {text}: {here.slice(0, 8).map(([layer, at]) => `${layer === null ? "" : `layer ${layer}, `}step ${grouped(at)}`).join("; ")}
            {here.length > 8 && ` and ${grouped(here.length - 8)} more`}
          </p>
        );
      })}
      {errors.map(([one, why]) => (
        <p key={one} class="warning">
          step {one}: {why}
        </p>
      ))}
      {found && (
        <section>
          <h2>At step {grouped(step)}</h2>
          {at < 0 && <p class="quiet">There is no value at this step: it has nothing before it to be compared with, or no such tensors.</p>}
          <DataTable id="layers" caption={`${label} at step ${step}`} columns={columns} rows={rows} rowKey={(row) => row.name} height={340} />
          <Python code={lines["table"]} />
        </section>
      )}
    </>
  );
}
