// The architecture: parameters by layer and kind, and what a change would cost in memory.

import { useMemo } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import { Memory } from "../parts/memory";
import { Ending } from "../ui/ending";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { Python, useLines } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { bytes, count, counted, grouped, shownName } from "../ui/text";
import { Treemap, type Branch } from "../ui/treemap";
import "./architecture.css";

interface Kind {
  kind: string;
  role: string;
  layers: number[];
  tensors: number;
  numel: number;
  nbytes: number;
  shape: number[] | null;
  dtype: string | null;
  first: string;
}

interface Block {
  stack: string;
  label: string;
  layers: number[];
  tensors: number;
  numel: number;
  nbytes: number;
}

interface Architecture {
  roles: string[];
  numel: number;
  nbytes: number;
  kinds: Kind[];
  blocks: Block[];
}

/** The parameters of the page that its lines of Python depend on. */
const SAID = ["state", "step", "side", "by", "unit", "dtype", "tp", "pp", "dp", "ep", "zero", "optimizer", "gradients"];

export function ArchitecturePage() {
  const { api, route, go } = useExplorer();
  const { state, step, side, by = "role", unit = "bytes" } = route.params;
  const loaded = useLoaded((signal) => api.json<Architecture>("architecture", { state, step, side }, signal), [state, step, side]);
  const active = route.params["part"];
  const setActive = (part: string | undefined) => go({ part }, undefined, true);
  const lines = useLines(Object.fromEntries(SAID.map((key) => [key, route.params[key]])));
  const found = loaded.value;
  const branches = useMemo(() => (found ? branchesOf(found, by, unit) : []), [found, by, unit]);
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!found) return <p class="quiet">Counting parameters …</p>;
  const part = partOf(found);
  const choices = (name: string, value: string, of: string[]) => (
    <span role="group" aria-label={name} class="choices">
      {of.map((one) => (
        <button key={one} type="button" class="small" aria-pressed={one === value} onClick={() => go({ [name]: one === of[0] ? undefined : one }, undefined, true)}>
          {one}
        </button>
      ))}
    </span>
  );
  return (
    <div class="architecture">
      <Figure
        title="Parameters"
        name="architecture"
        note={`${count(found.numel)} elements, ${bytes(found.nbytes)}; areas are ${unit === "bytes" ? "bytes" : "numbers of elements"}`}
        tools={
          <>
            {choices("by", by, ["role", "layers"])}
            {choices("unit", unit, ["bytes", "elements"])}
          </>
        }
        python={lines["architecture"]}
      >
        <Treemap branches={branches} label={`Treemap of ${unit} by ${by}`} onLeaf={(key) => setActive(key === active ? undefined : key)} active={active} />
      </Figure>
      <section>
        <h2>By kind</h2>
        <p class="quiet">A kind is a name with * in place of numbers. The column “for” is what such a name usually stands for.</p>
        <DataTable
          id="kinds"
          caption="kinds"
          columns={kindColumns(part)}
          rows={active ? found.kinds.filter((kind) => kind.kind === active || by !== "role") : found.kinds}
          rowKey={(kind) => kind.kind}
          sort={{ key: "bytes", down: true }}
          onRow={(kind) => go({ name: kind.first }, "tree")}
          note={
            active && by === "role" ? (
              <button type="button" class="small" onClick={() => setActive(undefined)}>
                show all kinds
              </button>
            ) : undefined
          }
        />
        <Python code={lines["kinds"]} />
      </section>
      {found.blocks.length > 0 && (
        <section>
          <h2>By layer</h2>
          <p class="quiet">Layers with the same kinds, shapes and dtypes share a row.</p>
          <DataTable id="layers" caption="layers" columns={BLOCKS} rows={found.blocks} rowKey={(block) => `${block.stack} ${block.label}`} height={300} />
          <Python code={lines["layers"]} />
        </section>
      )}
      <Memory python={lines["memory"]} />
    </div>
  );
}

type Part = (nbytes: number) => string;

function partOf(found: Architecture): Part {
  return (nbytes) => (found.nbytes ? `${((100 * nbytes) / found.nbytes).toFixed(nbytes / found.nbytes < 0.1 ? 2 : 1)} %` : "");
}

function branchesOf(found: Architecture, by: string, unit: string): Branch[] {
  const of = (one: { nbytes: number; numel: number }) => (unit === "bytes" ? one.nbytes : one.numel);
  const text = (n: number) => (unit === "bytes" ? bytes(n) : count(n));
  const part = partOf(found);
  const leaf = (kind: Kind, label = kind.kind) => ({
    key: kind.kind,
    label,
    value: of(kind),
    detail: [
      shownName(kind.kind),
      `${grouped(kind.tensors)} × ${kind.shape ? `[${kind.shape.join(", ")}]` : "different shapes"} ${kind.dtype ?? "different dtypes"}`,
      `${count(kind.numel)} elements, ${bytes(kind.nbytes)} (${part(kind.nbytes)})`,
    ].join("\n"),
  });
  const tail = (kind: Kind) => kind.kind.replace(/^.*?\*\./, "") || kind.kind;
  if (by === "role") {
    return found.roles.flatMap((role) => {
      const kinds = found.kinds.filter((kind) => kind.role === role);
      const sum = kinds.reduce((n, kind) => n + of(kind), 0);
      return kinds.length ? [{ key: role, label: role, size: text(sum), colour: `role-${role}`, leaves: kinds.map((kind) => leaf(kind, tail(kind))) }] : [];
    });
  }
  const blocks = found.blocks.map((block, n) => ({
    key: `${block.stack} ${block.label}`,
    label: `${block.stack}${block.label}`,
    size: text(of(block) * block.layers.length),
    colour: `line-fill-${n % 8}`,
    leaves: block.layers.map((layer) => ({
      key: `${block.stack}${layer}`,
      label: String(layer),
      value: of(block),
      detail: `${block.stack}${layer}\n${counted(block.tensors, "tensor")}, ${count(block.numel)} elements, ${bytes(block.nbytes)} (${part(block.nbytes)})`,
    })),
  }));
  const alone = found.kinds.filter((kind) => !kind.layers.length);
  const sum = alone.reduce((n, kind) => n + of(kind), 0);
  return alone.length ? [...blocks, { key: "-", label: "outside layers", size: text(sum), colour: "role-other", leaves: alone.map((kind) => leaf(kind)) }] : blocks;
}

function kindColumns(part: Part): Column<Kind>[] {
  return [
    { key: "kind", title: "kind", value: (kind) => kind.kind, cell: (kind) => <Ending text={kind.kind} />, width: "minmax(260px,2fr)" },
    { key: "role", title: "for", value: (kind) => kind.role, cell: (kind) => <span class={`role role-${kind.role}`}>{kind.role}</span>, width: "100px" },
    { key: "layers", title: "layers", number: true, value: (kind) => kind.layers.length || null, width: "70px" },
    { key: "tensors", title: "tensors", number: true, value: (kind) => kind.tensors, width: "80px" },
    {
      key: "shape", title: "shape of each", width: "150px",
      value: (kind) => (kind.shape ? `[${kind.shape.join(", ")}]` : "different"),
      cell: (kind) => <span class="mono">{kind.shape ? `[${kind.shape.join(", ")}]` : "different"}</span>,
    },
    { key: "dtype", title: "dtype", value: (kind) => kind.dtype ?? "different", width: "80px" },
    { key: "elements", title: "elements", number: true, value: (kind) => kind.numel, cell: (kind) => count(kind.numel), width: "90px" },
    { key: "bytes", title: "size", number: true, value: (kind) => kind.nbytes, cell: (kind) => bytes(kind.nbytes), width: "90px" },
    { key: "share", title: "share", number: true, value: (kind) => kind.nbytes, cell: (kind) => part(kind.nbytes), width: "70px" },
  ];
}

const BLOCKS: Column<Block>[] = [
  { key: "layers", title: "layers", value: (block) => block.stack + block.label, cell: (block) => shownName(block.stack + block.label), width: "minmax(200px,2fr)" },
  { key: "count", title: "number", number: true, value: (block) => block.layers.length, width: "80px" },
  { key: "tensors", title: "tensors each", number: true, value: (block) => block.tensors },
  { key: "elements", title: "elements each", number: true, value: (block) => block.numel, cell: (block) => count(block.numel) },
  { key: "bytes", title: "size each", number: true, value: (block) => block.nbytes, cell: (block) => bytes(block.nbytes) },
  { key: "all", title: "size of all", number: true, value: (block) => block.nbytes * block.layers.length, cell: (block) => bytes(block.nbytes * block.layers.length) },
];
