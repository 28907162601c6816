// The card of a chosen tensor or group, at the side of the tree.

import { useMemo } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import { PageLink } from "../parts/pagelink";
import type { Facts } from "../tensor/cards";
import { LineChart } from "../ui/line";
import { CopyButton, Python, useLines } from "../ui/python";
import { shortNumber } from "../ui/axis";
import { bytes, counted, grouped, shownName, shownTensor } from "../ui/text";
import type { Marks, Norms, State } from "./load";
import type { Tree } from "./nodes";
import type { Row } from "./rows";
import type { NormSums, Sums } from "./sums";

interface Props {
  state: State;
  tree: Tree;
  row: Row;
  sums: Sums;
  norms: Norms | null;
  normSums: NormSums | null;
  marks: Marks | undefined;
  params: Record<string, string | undefined>;
}

const CHOICES = 1000; // alike tensors that can be chosen from a list

export function Card(props: Props) {
  const { row } = props;
  return (
    <aside class="card" aria-label="Details of the selection">
      {row.leaf ? <TensorCard {...props} /> : <GroupCard {...props} />}
    </aside>
  );
}

function TensorCard({ state, tree, row, norms, normSums, marks, params }: Props) {
  const { api, route, go } = useExplorer();
  const places = useMemo(() => row.copies.map((copy) => tree.at(row.node.leaf + copy)), [row, tree]);
  const wanted = route.params["name"] === undefined ? -1 : state.names.find(route.params["name"]);
  const n = places.includes(wanted) ? wanted : places[0]!;
  const name = state.names.name(n);
  const { shape, dtype } = state.kindOf(n);
  const facts = useLoaded((signal) => api.json<Facts>("tensor", { ...params, name }, signal), [name, state]);
  const lines = useLines({ page: "tensor", name, state: params["state"], step: params["step"], side: params["side"] });
  const found = facts.value;
  const owner = state.tied.get(n);
  const series = normSums && row.series > 1 ? normSums.series(row, row.series) : null;
  return (
    <>
      <h2 class="mono">
        {shownTensor(name)} <CopyButton text={name} label="copy the name" />
      </h2>
      <p class="card-open">
        <TensorLink name={name} />
      </p>
      {places.length > 1 && places.length <= CHOICES && (
        <label class="quiet">
          one of {grouped(places.length)} alike{" "}
          <select value={String(n)} onChange={(event) => go({ name: state.names.name(Number(event.currentTarget.value)) }, undefined, true)}>
            {places.map((one) => (
              <option key={one} value={String(one)}>
                {shownName(state.names.name(one))}
              </option>
            ))}
          </select>
        </label>
      )}
      <dl>
        <dt>shape</dt>
        <dd class="mono">[{shape.map(grouped).join(", ")}]</dd>
        <dt>dtype</dt>
        <dd>{dtype}</dd>
        <dt>elements</dt>
        <dd>{grouped(state.numel(n))}</dd>
        <dt>size</dt>
        <dd>
          {bytes(state.bytes(n))} <span class="quiet">({grouped(state.bytes(n))} B)</span>
        </dd>
        {owner !== undefined && [<dt key="t">tied to</dt>, <dd key="o" class="mono">{shownName(owner)}</dd>]}
        {norms && !Number.isNaN(norms.norm[n]!) && [
          <dt key="n">norm</dt>,
          <dd key="v">{shortNumber(norms.norm[n]!)}</dd>,
          <dt key="r">root mean square</dt>,
          <dd key="s">{shortNumber(norms.norm[n]! / Math.sqrt(Math.max(1, state.numel(n))))}</dd>,
          <dt key="a">largest</dt>,
          <dd key="b">{shortNumber(norms.largest[n]!)}</dd>,
        ]}
        {norms && norms.odd[n]! > 0 && [<dt key="x">not finite</dt>, <dd key="y" class="error">{counted(norms.odd[n]!, "element")}</dd>]}
        {marks?.lost.has(n) && [<dt key="l">lost</dt>, <dd key="m" class="error">{counted(marks.lost.get(n)!, "element")} in no file that can be read</dd>]}
        {found?.about.map(([what, text]) => [<dt key={what}>{what}</dt>, <dd key={`=${what}`}>{shownName(text)}</dd>])}
        {found && found.states.length > 1 && [
          <dt key="st">states</dt>,
          <dd key="sv">{found.states.map((one) => `${shownName(one.name)} (${one.short})`).join(", ")}</dd>,
        ]}
      </dl>
      {[...(marks?.problems.get(n) ?? []), ...(found?.problems.map(({ text }) => text) ?? [])]
        .filter((text, at, all) => all.indexOf(text) === at)
        .map((text) => (
          <p key={text} class="warning">
            {shownName(text)}
          </p>
        ))}
      {series && (
        <LineChart
          series={[{ name: shownName(row.label), x: row.labels, y: series }]}
          label={`norm of ${shownName(row.label)} by layer`}
          xLabel="layer"
          yLabel="L2 norm"
          height={170}
          onPoint={(_, at) => go({ name: state.names.name(places[at * (places.length / row.series)]!) }, undefined, true)}
        />
      )}
      {found && found.ranges.length > 0 && (
        <>
          <h3>Where its bytes lie</h3>
          <table>
            <thead>
              <tr>
                <th scope="col">rank</th>
                <th scope="col">file</th>
                <th scope="col" class="number">
                  offset
                </th>
                <th scope="col" class="number">
                  bytes
                </th>
              </tr>
            </thead>
            <tbody>
              {found.ranges.slice(0, 60).map((range, at) => (
                <tr key={at} class={range.missing ? "error" : undefined} title={range.missing ? shownName(range.missing) : undefined}>
                  <td>{range.rank === range.path ? "" : shownName(range.rank)}</td>
                  <td class="path">{shownName(range.path)}</td>
                  <td class="number">{range.missing ? "missing" : range.offset === null ? "packed" : grouped(range.offset)}</td>
                  <td class="number">{grouped(range.nbytes)}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {found.ranges_in_all > 60 && <p class="quiet">and {grouped(found.ranges_in_all - 60)} more</p>}
        </>
      )}
      <Python code={lines["tensor"]} />
      {facts.error && <p class="quiet">{facts.error.message}</p>}
    </>
  );
}

function TensorLink({ name }: { name: string }) {
  const { route, api } = useExplorer();
  const shared = Object.fromEntries(["state", "step", "side"].flatMap((key) => (route.params[key] ? [[key, route.params[key]!]] : [])));
  if (!api.holds("tensor", { ...shared, name })) return null;
  return (
    <PageLink page="tensor" params={{ name }}>
      Look at its values →
    </PageLink>
  );
}

interface Totals {
  states: { name: string; tensors: number; numel: number; nbytes: number }[];
}

function GroupCard({ state, tree, row, sums, normSums, params }: Props) {
  const { api } = useExplorer();
  const path = tree.path({ ...row.node, leaf: -1 });
  const folded = row.copies.length;
  const lines = useLines({ page: "tree", path, state: params["state"], step: params["step"], side: params["side"] });
  const totals = useLoaded((signal) => api.json<Totals>("tree/totals", { step: params["step"], side: params["side"], prefix: path }, signal), [path, state]).value;
  const dtypes = useMemo(() => {
    const found = new Map<string, { tensors: number; numel: number; nbytes: number }>();
    for (const n of sums.numbers(row)) {
      const { dtype } = state.kindOf(n);
      const sum = found.get(dtype) ?? found.set(dtype, { tensors: 0, numel: 0, nbytes: 0 }).get(dtype)!;
      sum.tensors += folded;
      if (state.twice.has(n)) continue;
      sum.numel += state.numel(n) * folded;
      sum.nbytes += state.bytes(n) * folded;
    }
    return [...found].sort((a, b) => b[1].nbytes - a[1].nbytes);
  }, [row, state]);
  const series = normSums && row.series > 1 ? normSums.series(row, row.series) : null;
  const norm = normSums ? normSums.norm(row) : NaN;
  return (
    <>
      <h2 class="mono">
        {shownName(path)}
        {row.numbers && ` (the same for ${row.numbers})`} <CopyButton text={path} label="copy the prefix" />
      </h2>
      <dl>
        <dt>tensors</dt>
        <dd>{grouped(sums.tensors(row))}</dd>
        <dt>elements</dt>
        <dd>{grouped(sums.numel(row))}</dd>
        <dt>size</dt>
        <dd>{bytes(sums.bytes(row))}</dd>
        {folded > 1 && [
          <dt key="e">each</dt>,
          <dd key="v">
            {counted(sums.tensors(row) / folded, "tensor")}, {bytes(sums.bytes(row) / folded)}
          </dd>,
        ]}
        {!Number.isNaN(norm) && [<dt key="n">norm</dt>, <dd key="w">{shortNumber(norm)}</dd>]}
        {row.differs && [<dt key="d">differs</dt>, <dd key="x" class="warning">{shownName(row.differs)}</dd>]}
      </dl>
      <h3>By dtype</h3>
      <SumTable rows={dtypes.map(([what, sum]) => ({ what, ...sum }))} head="dtype" />
      {totals && totals.states.length > 1 && (
        <>
          <h3>By state{folded > 1 ? `, of ${shownName(path)} alone` : ""}</h3>
          <SumTable rows={totals.states.map(({ name, ...sum }) => ({ what: shownName(name), ...sum }))} head="state" />
        </>
      )}
      {series && (
        <LineChart
          series={[{ name: shownName(row.label), x: row.labels, y: series }]}
          label="norm by layer"
          xLabel="layer"
          yLabel="L2 norm"
          height={170}
        />
      )}
      <Python code={lines["group"]} />
    </>
  );
}

interface SumRow {
  what: string;
  tensors: number;
  numel: number;
  nbytes: number;
}

function SumTable({ rows, head }: { rows: SumRow[]; head: string }) {
  return (
    <table>
      <thead>
        <tr>
          <th scope="col">{head}</th>
          <th scope="col" class="number">
            tensors
          </th>
          <th scope="col" class="number">
            elements
          </th>
          <th scope="col" class="number">
            size
          </th>
        </tr>
      </thead>
      <tbody>
        {rows.map(({ what, tensors, numel, nbytes }) => (
          <tr key={what}>
            <td>{what}</td>
            <td class="number">{grouped(tensors)}</td>
            <td class="number">{grouped(numel)}</td>
            <td class="number">{bytes(nbytes)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
