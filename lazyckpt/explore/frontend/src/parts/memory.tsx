// The memory that training or serving the model takes on each rank, for a dtype, a mesh and an optimizer.

import { useExplorer, useLoaded, useParam } from "../context";
import { Details } from "../ui/details";
import { Failure } from "../ui/failure";
import { Python } from "../ui/python";
import { bytes, count, counted, grouped, shownName } from "../ui/text";
import "./memory.css";

interface Cost {
  what: string;
  nbytes: number;
  how: string;
}

interface Stage {
  stage: number;
  others: number;
  experts: number;
  tensors: number;
  nbytes: number;
  costs: Cost[];
}

interface Costs {
  world: number;
  stages: Stage[];
  assumed: string[];
}

const DTYPES: [string, string][] = [
  ["", "as stored"],
  ["float32", "float32"],
  ["bfloat16", "bfloat16"],
  ["float16", "float16"],
  ["float8_e4m3fn", "float8"],
  ["int8", "int8"],
];
const OPTIMIZERS: [string, string][] = [
  ["adamw", "AdamW, fp32 moments"],
  ["adamw-bf16", "AdamW, bf16 moments"],
  ["adamw-8bit", "AdamW, 8-bit moments"],
  ["sgd", "SGD with momentum"],
  ["none", "none: no training"],
];
const GRADIENTS: [string, string][] = [
  ["float32", "float32"],
  ["same", "as weights"],
  ["bfloat16", "bfloat16"],
];
const ZERO: [string, string][] = [
  ["0", "0: whole on each"],
  ["1", "1: optimizer divided"],
  ["2", "2: and gradients"],
  ["3", "3: and weights"],
];
const DEGREES = ["tp", "pp", "dp", "ep"] as const;

export function Memory({ python }: { python: string | undefined }) {
  const { api, route, go } = useExplorer();
  const { step, side, dtype = "", zero = "0", optimizer = "adamw", gradients = "float32" } = route.params;
  const degrees = Object.fromEntries(DEGREES.map((axis) => [axis, route.params[axis] ?? "1"])) as Record<(typeof DEGREES)[number], string>;
  const asked = {
    step, side,
    dtype: dtype || undefined,
    ...Object.fromEntries(DEGREES.map((axis) => [axis, degrees[axis] === "1" ? undefined : degrees[axis]])),
    zero: zero === "0" ? undefined : zero,
    optimizer: optimizer === "adamw" ? undefined : optimizer,
    gradients: gradients === "float32" ? undefined : gradients,
  };
  const loaded = useLoaded((signal) => api.json<Costs>("architecture/memory", asked, signal), [JSON.stringify(asked)]);
  const [chosen, choose] = useParam("stage", "");
  const pick = (name: string, value: string, first: string) => go({ [name]: value === first ? undefined : value }, undefined, true);
  const select = (name: string, title: string, value: string, of: [string, string][]) => (
    <label>
      {title}
      <select value={value} disabled={!api.live} onChange={(event) => pick(name, event.currentTarget.value, of[0]![0])}>
        {of.map(([key, text]) => (
          <option key={key} value={key}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
  const costs = loaded.value;
  const most = costs ? Math.max(...costs.stages.map((stage) => stage.nbytes)) : 0;
  const fullest = costs?.stages.find(({ nbytes }) => nbytes === most);
  const stage = costs?.stages.find((one) => String(one.stage) === chosen) ?? fullest;
  return (
    <section class="memory">
      <h2>Memory on each rank</h2>
      <form class="memory-form" onSubmit={(event) => event.preventDefault()}>
        {select("dtype", "weights", dtype, DTYPES)}
        {DEGREES.map((axis) => (
          <label key={axis} title={{ tp: "tensor parallel", pp: "pipeline stages", dp: "data parallel", ep: "expert parallel" }[axis]}>
            {axis}
            <input
              class="field"
              type="number"
              min="1"
              max="1048576"
              step="1"
              disabled={!api.live}
              value={degrees[axis]}
              onChange={(event) => pick(axis, String(Math.max(1, Math.floor(Number(event.currentTarget.value) || 1))), "1")}
            />
          </label>
        ))}
        {select("optimizer", "optimizer", optimizer, OPTIMIZERS)}
        {optimizer !== "none" && select("gradients", "gradients", gradients, GRADIENTS)}
        {select("zero", "ZeRO", zero, ZERO)}
      </form>
      {loaded.error && <Failure error={loaded.error} />}
      {costs && stage && fullest && !loaded.error && (
        <>
          <p class="memory-sum">
            <strong>{bytes(most)}</strong>{" "}
            {costs.stages.length > 1 ? `on each rank of pipeline stage ${fullest.stage}, the fullest` : costs.world === 1 ? "on one rank" : `on each of ${grouped(costs.world)} ranks`}
            {costs.stages.length > 1 && <span class="quiet"> ({grouped(costs.world)} ranks in all)</span>}
          </p>
          <div class="memory-bars" role="img" aria-label={`memory by pipeline stage: ${costs.stages.map((one) => bytes(one.nbytes)).join(", ")}`}>
            {costs.stages.slice(0, 64).map((one) => (
              <div key={one.stage} class={`memory-row${one === stage && costs.stages.length > 1 ? " active" : ""}`} onClick={() => choose(String(one.stage))}>
                <span class="quiet">{costs.stages.length > 1 ? `stage ${one.stage}` : "each rank"}</span>
                <span class="memory-bar">
                  {one.costs.map((cost, n) => (
                    <span key={cost.what} class={`memory-part line-fill-${FILL[n % FILL.length]}`} style={{ width: `${most ? (100 * cost.nbytes) / most : 0}%` }} title={`${cost.what}: ${bytes(cost.nbytes)}`} />
                  ))}
                </span>
                <span class="memory-size">{bytes(one.nbytes)}</span>
              </div>
            ))}
          </div>
          <table class="memory-table">
            <caption>
              {costs.stages.length > 1 ? `A rank of stage ${stage.stage}: ` : "Each rank: "}
              {counted(stage.tensors, "tensor")}, {count(stage.others + stage.experts)} elements
              {stage.experts > 0 && `, of which ${count(stage.experts)} are experts'`} before data-parallel ranks divide them
            </caption>
            <thead>
              <tr>
                <th scope="col">what</th>
                <th scope="col" class="number">
                  bytes on each rank
                </th>
                <th scope="col">arithmetic</th>
              </tr>
            </thead>
            <tbody>
              {stage.costs.map((cost, n) => (
                <tr key={cost.what}>
                  <td>
                    <span class={`memory-key line-fill-${FILL[n % FILL.length]}`} />
                    {shownName(cost.what)}
                  </td>
                  <td class="number">{bytes(cost.nbytes)}</td>
                  <td class="quiet">{cost.how}</td>
                </tr>
              ))}
              <tr>
                <td>all</td>
                <td class="number">{bytes(stage.nbytes)}</td>
                <td />
              </tr>
            </tbody>
          </table>
          <Details id="assumed" summary="What this assumes" open>
            <ul>
              {costs.assumed.map((line) => (
                <li key={line}>{line}</li>
              ))}
            </ul>
          </Details>
        </>
      )}
      {!costs && !loaded.error && <p class="quiet">Computing …</p>}
      {!api.live && <p class="quiet">A report has this for one rank only; `lazyckpt serve` computes it for any mesh.</p>}
      <Python code={python} />
    </section>
  );
}

const FILL = [3, 2, 6, 0, 5, 1];
