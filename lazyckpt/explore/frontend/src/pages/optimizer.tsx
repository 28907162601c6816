// The optimizer: its states beside the weights, its last step, and what does not learn.

import { useExplorer, useLoaded } from "../context";
import { Ask } from "../parts/ask";
import { LayerGrid, numeric, text, type Layers } from "../parts/layergrid";
import { Ending } from "../ui/ending";
import { Failure } from "../ui/failure";
import { DataTable, type Column } from "../ui/table";
import { Python, useLines } from "../ui/python";
import { capital, counted, grouped } from "../ui/text";
import "./optimizer.css";

interface StateLayers extends Layers {
  zeros: [string, number, number][];
  zeros_in_all: number;
}

type Row = [string, string, number | null, number | string | null, number | string | null, number | null, string | null];

interface Updates extends Layers {
  rows: Row[];
  rows_in_all: number;
  problems: string[];
}

export function OptimizerPage() {
  const { about, route, go } = useExplorer();
  const which = route.params["side"] === "b" ? 1 : 0;
  const side = about.sides[which] ?? about.sides[0]!;
  const names = side.states.map(({ name }) => name);
  const moments = names.filter((name) => name !== side.state && name !== "fp32" && name !== "weights");
  const { state: asked, step } = route.params;
  const state = asked !== undefined && names.includes(asked) ? asked : (moments[0] ?? side.state);
  const { of = "rms" } = route.params;
  const quantity = Object.hasOwn(QUANTITIES, of) ? of : "rms";
  const chosen = side.states.find(({ name }) => name === state);
  const whole = side.states.reduce((sum, { nbytes }) => sum + nbytes, 0);
  if (names.length < 2) {
    // the page is there for the other side of a comparison
    const [here, there] = which ? ["B", "A"] : ["A", "B"];
    return (
      <p>
        {here} has no states of an optimizer.{" "}
        <button type="button" class="small" onClick={() => go({ side: which ? undefined : "b", state: undefined }, undefined, true)}>
          Show those of {there}
        </button>
      </p>
    );
  }
  return (
    <>
      <section aria-label="States">
        <p class="controls">
          <label>
            State{" "}
            <select value={state} onChange={(event) => go({ state: event.currentTarget.value }, undefined, true)}>
              {names.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>{" "}
          <label>
            Quantity{" "}
            <select value={quantity} onChange={(event) => go({ of: event.currentTarget.value }, undefined, true)}>
              {Object.entries(QUANTITIES).map(([name, what]) => (
                <option key={name} value={name}>
                  {what}
                </option>
              ))}
            </select>
          </label>
        </p>
        <Ask key={`${which} ${state} ${step}`} reads={chosen?.nbytes ?? 0} what={`quantities of ${state}`}>
          {() => <State state={state} quantity={quantity} />}
        </Ask>
      </section>
      <section aria-label="Last step">
        <Ask key={`${which} ${step}`} reads={whole} what="the optimizer's last step">
          {() => <LastStep state={state} />}
        </Ask>
      </section>
    </>
  );
}

const QUANTITIES: Record<string, string> = {
  rms: "root mean square",
  norm: "L2 norm",
  std: "standard deviation",
  absmax: "largest |x|",
  zeros: "share of zeros",
};

function State({ state, quantity }: { state: string; quantity: string }) {
  const { api, about, route, go } = useExplorer();
  const { step, side } = route.params;
  const own = state === (about.sides[side === "b" ? 1 : 0] ?? about.sides[0]!).state ? undefined : state;
  const { value, error } = useLoaded((signal) => api.json<StateLayers>("layers", { state: own, step, side }, signal), [own, step, side]);
  const lines = useLines({ state, step, side, of: quantity === "rms" ? undefined : quantity });
  if (error) return <Failure error={error} />;
  if (!value) return <p class="quiet optimizer-wait">Reading {state} …</p>;
  const dead = value.zeros.filter(([, count, zeros]) => zeros === count);
  return (
    <>
      <LayerGrid id="state" note="by kind of parameter and layer" found={value} quantity={quantity} title={capital(`${value.quantities[quantity]} of ${state}`)} python={lines["layers"]} table={lines["table"]} />
      <h2>Zeros in {state}</h2>
      <p class="quiet">
        {dead.length
          ? `${counted(dead.length, "tensor")} ${dead.length === 1 ? "is" : "are"} all zero: parameters whose gradient was always zero have such moments.`
          : "No tensor is all zero."}{" "}
        {value.zeros_in_all > value.zeros.length && `The ${grouped(value.zeros.length)} with the largest shares of ${grouped(value.zeros_in_all)}.`}
      </p>
      {value.zeros.length > 0 && <DataTable
        id="zeros"
        columns={ZEROS}
        rows={value.zeros}
        caption={`zeros in ${state}`}
        rowKey={([name]) => name}
        height={280}
        onRow={([name]) => go({ name, state: own }, "tensor")}
      />}
      {value.zeros.length > 0 && <Python code={lines["zeros"]} />}
    </>
  );
}

const ZEROS: Column<[string, number, number]>[] = [
  { key: "name", title: "tensor", value: ([name]) => name, cell: ([name]) => <Ending text={name} />, width: "minmax(260px,2fr)" },
  { key: "count", title: "elements", number: true, value: ([, count]) => count, width: "130px" },
  { key: "zeros", title: "zeros", number: true, value: ([, , zeros]) => zeros, width: "130px" },
  { key: "share", title: "share", number: true, value: ([, count, zeros]) => zeros / count, cell: ([, count, zeros]) => `${((100 * zeros) / count).toFixed(zeros === count ? 0 : 2)} %`, width: "90px" },
];

function LastStep({ state }: { state: string }) {
  const { api, route } = useExplorer();
  const { step, side } = route.params;
  const { value, error } = useLoaded((signal) => api.json<Updates>("updates", { step, side }, signal), [step, side]);
  const lines = useLines({ state, step, side });
  if (error) return <Failure error={error} />;
  if (!value) return <p class="quiet">Computing the last step …</p>;
  return (
    <>
      {value.rows.length > 0 && (
        <LayerGrid id="steps" found={value} quantity="ratio" title="The last step, in units of the weights" python={lines["updates"]} />
      )}
      {value.problems.map((problem) => (
        <p key={problem} class="quiet">
          {problem}
        </p>
      ))}
      {value.rows.length > 0 && <DataTable id="steps" columns={STEPS} rows={value.rows} caption="last step" rowKey={([name]) => name} height={320} />}
      {value.rows.length > 0 && <Python code={lines["steps"]} />}
    </>
  );
}

const STEPS: Column<Row>[] = [
  { key: "name", title: "parameter", value: ([name]) => name, cell: ([name]) => <Ending text={name} />, width: "minmax(260px,2fr)" },
  { key: "optimizer", title: "optimizer", value: ([, optimizer]) => optimizer, width: "90px" },
  { key: "lr", title: "learning rate", number: true, value: ([, , lr]) => lr, width: "120px" },
  { key: "ratio", title: "update / weight", number: true, value: (row) => numeric(row[3] as number), cell: (row) => text(numeric(row[3] as number)), width: "130px" },
  { key: "rms", title: "rms of the update", number: true, value: (row) => numeric(row[4] as number), cell: (row) => text(numeric(row[4] as number)), width: "140px" },
  { key: "bound", title: "at the bound", number: true, value: ([, , , , , bound]) => bound, cell: ([, , , , , bound]) => (bound === null ? "" : `${(100 * bound).toFixed(1)} %`), hint: "share of elements that Adam or Lion moves by the whole learning rate", width: "110px" },
  { key: "error", title: "error", value: (row) => row[6], width: "minmax(80px,1fr)" },
];
