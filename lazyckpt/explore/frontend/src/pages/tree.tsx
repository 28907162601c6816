// The tree of tensors, with a search, and a card of what is chosen.

import type { CSSProperties } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import { Card } from "../tree/card";
import { keysOf, textOf } from "../tree/keys";
import { computeNorms, IDLE, keptNorms, loadMarks, loadState, LOST, PROBLEM, TIED, type Marks, type Norms, type State } from "../tree/load";
import { upTo } from "../tree/names";
import { Tree } from "../tree/nodes";
import { openAtFirst, openTo, visibleRows, type Row, type Weight } from "../tree/rows";
import { NormSums, Sums } from "../tree/sums";
import { CopyButton } from "../ui/python";
import { Details } from "../ui/details";
import { Failure } from "../ui/failure";
import { Sparkline } from "../ui/line";
import { saveCsv } from "../ui/save";
import { shortNumber } from "../ui/axis";
import { bytes, counted, grouped, newId, shownName, shownTensor } from "../ui/text";
import { VirtualList } from "../ui/virtual";
import "./tree.css";

const ROW = 26;
const SORTS = ["name", "size", "dtype", "norm"] as const;

export function TreePage() {
  const { api, route } = useExplorer();
  const { state, step, side } = route.params;
  const loaded = useLoaded(async () => {
    const params = { state, step, side };
    return { params, tensors: await loadState(api, params) };
  }, [state, step, side]);
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!loaded.value) return <p class="quiet">Reading names …</p>;
  const { params, tensors } = loaded.value; // those before, until the new ones are here
  return <TreeOf key={`${params.state} ${params.step} ${params.side}`} state={tensors} params={params} />;
}

function TreeOf({ state, params }: { state: State; params: Record<"state" | "step" | "side", string | undefined> }) {
  const { api, route, go } = useExplorer();
  const [rowId] = useState(() => newId("row")); // a notebook may show several trees
  const { q = "", sort = "name", open: opened, each = "", at, name } = route.params;
  const marks = useLoaded((signal) => loadMarks(api, params, signal), [state]).value;
  const [norms, setNorms] = useState<Norms | null>(() => keptNorms(state));

  const whole = useMemo(() => new Tree(state.names, state.kind, null, state.kindText), [state]);
  const found = useMemo(() => state.names.search(q), [state, q]);
  const tree = useMemo(() => (found && found.length < whole.count ? new Tree(state.names, state.kind, found, state.kindText) : whole), [found, whole]);
  const sums = useMemo(() => new Sums(tree, state), [tree]);
  const normSums = useMemo(() => norms && new NormSums(tree, norms, state), [tree, norms]);
  const first = useMemo(() => openAtFirst(tree, tree === whole ? undefined : 400), [tree]);
  const open = useMemo(() => (opened === undefined ? first : keysOf(opened)), [opened, first]);
  const unfolded = useMemo(() => keysOf(each), [each]);
  const weight = useMemo<Weight>(() => weightOf(sort, sums, state, tree, normSums), [sort, sums, normSums]);
  const rows = useMemo(() => visibleRows(tree, open, unfolded, weight), [tree, open, unfolded, weight]);
  const kin = useMemo(() => (norms ? kinOf(state) : null), [norms && state]);
  const curves = useMemo(() => !!kin || rows.some((row) => row.series > 1), [rows, kin]);
  const room = useMemo(() => shapeRoom(state), [state]);

  useEffect(() => {
    const timer = setTimeout(() => state.names.warm(), 300);
    return () => clearTimeout(timer);
  }, [state]);

  // a link to a tensor opens what is above it
  const number = name === undefined ? -1 : state.names.find(name);
  useEffect(() => {
    if (number >= 0 && !at && !found) {
      const above = openTo(tree, number, unfolded);
      if (above.some((key) => !open.has(key))) go({ open: textOf([...open, ...above]) }, undefined, true);
    }
  }, [number, tree]);
  const active = rows.findIndex((row) => (at ? row.key === at && !(row.leaf && row.node.low < row.node.high) : row.leaf && number >= 0 && stands(tree, row, number)));

  const choose = (row: Row) => {
    if (row.leaf) go({ at: row.copies.length > 1 ? row.key : undefined, name: state.names.name(tree.at(row.node.leaf)) }, undefined, true);
    else go({ at: row.key, name: undefined }, undefined, true);
  };
  const toggle = (row: Row, to = !row.open) => {
    const next = new Set(open);
    if (to) next.add(row.key);
    else next.delete(row.key);
    // what is chosen stays in view: closing a group above it chooses the group
    const hides = !to && above(rows, active, row);
    go({ open: textOf(next) || "-", ...(hides ? { at: row.key, name: undefined } : {}) }, undefined, true);
  };
  const unfold = (row: Row) => {
    const key = `${row.key.replace(/\.$/, "")}`;
    const next = new Set(unfolded);
    next.add(key);
    go({ each: textOf(next) }, undefined, true);
  };
  const letters = useRef({ text: "", time: 0 });
  const onKeyDown = (event: KeyboardEvent) => {
    const row = rows[active];
    const to = (n: number) => {
      event.preventDefault();
      const target = rows[Math.max(0, Math.min(rows.length - 1, n))];
      if (target) choose(target);
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowDown") to(active + 1);
    else if (event.key === "ArrowUp") to(active < 0 ? 0 : active - 1);
    else if (event.key === "Home") to(0);
    else if (event.key === "End") to(rows.length - 1);
    else if (event.key === "PageDown") to(active + 20);
    else if (event.key === "PageUp") to(active - 20);
    else if (event.key === "ArrowRight" && event.shiftKey && row?.numbers) {
      event.preventDefault();
      unfold(row);
    } else if (event.key === "ArrowRight" && row && !row.leaf) {
      if (row.open) to(active + 1);
      else {
        event.preventDefault();
        toggle(row, true);
      }
    } else if (event.key === "ArrowLeft" && row) {
      if (row.open) {
        event.preventDefault();
        toggle(row, false);
      } else if (row.parent >= 0) to(row.parent);
    } else if (event.key === "Enter" && row) {
      event.preventDefault();
      if (row.leaf) go({ name: state.names.name(tree.at(row.node.leaf)) }, "tensor");
      else toggle(row);
    } else if (event.key.length === 1 && /[\w.]/.test(event.key)) {
      const now = Date.now();
      const fresh = now - letters.current.time > 700;
      if (event.key === ".") {
        if (fresh) return; // it goes to the next step of a run
        event.stopPropagation();
      }
      letters.current = { text: (fresh ? "" : letters.current.text) + event.key.toLowerCase(), time: now };
      const begins = (n: number) => rows[n % rows.length]!.label.toLowerCase().startsWith(letters.current.text);
      for (let n = active + (fresh ? 1 : 0), end = n + rows.length; n < end; n += 1) {
        if (begins(Math.max(0, n))) return to(Math.max(0, n) % rows.length);
      }
    }
  };

  const parentBytes = (row: Row) => (row.parent >= 0 ? sums.bytes(rows[row.parent]!) : sums.bytes({ node: tree.root, leaf: false, copies: [0] }));
  const draw = (index: number, style: CSSProperties) => {
    const row = rows[index]!;
    const own = row.leaf ? tree.at(row.node.leaf) : -1;
    const size = sums.bytes(row);
    const share = parentBytes(row) ? size / parentBytes(row) : 0;
    const norm = normSums ? normSums.norm(row) : NaN;
    const times = row.copies.length;
    const label = labelOf(row, own < 0 ? undefined : state.names.name(own));
    return (
      <div
        key={`${row.key}${row.leaf ? "" : "/"}`}
        id={`${rowId}-${index}`}
        role="treeitem"
        aria-level={row.depth + 1}
        aria-setsize={row.siblings}
        aria-posinset={row.place}
        aria-expanded={row.leaf ? undefined : row.open}
        aria-selected={index === active}
        class={`tree-row${index === active ? " active" : ""}${row.leaf ? "" : " tree-group"}`}
        style={style}
        onClick={() => choose(row)}
        onDblClick={() => (row.leaf ? go({ name: state.names.name(own) }, "tensor") : toggle(row))}
      >
        <span class="tree-name" style={{ paddingLeft: `${row.depth * 16}px` }}>
          <span
            class={`tree-turn${row.leaf ? " tree-none" : row.open ? " tree-open" : ""}`}
            aria-hidden="true"
            onClick={(event) => {
              if (row.leaf) return;
              event.stopPropagation();
              toggle(row);
            }}
          />
          <span class="tree-label mono" title={label}>{label}</span>
          {row.numbers && (
            <span class="tree-fold">
              {grouped(row.copies.length / (row.parent >= 0 ? rows[row.parent]!.copies.length : 1))} alike
            </span>
          )}
          {row.differs && (
            <span class="tree-differs" title={`differs from most of its siblings: ${shownName(row.differs)}`}>
              {shownName(row.differs)}
            </span>
          )}
          <MarksOf marks={marks} norms={norms} row={row} tree={tree} sums={sums} />
          {row.numbers && (
            <button type="button" tabIndex={-1} class="tree-each" title="list each of them (Shift →)" onClick={(event) => { event.stopPropagation(); unfold(row); }}>
              list each
            </button>
          )}
          {row.leaf && times === 1 && <CopyButton text={state.names.name(own)} label="copy the name" />}
        </span>
        <span class="tree-shape mono">{row.leaf ? `[${state.kindOf(own).shape.join(", ")}]` : counted(sums.tensors(row), "tensor")}</span>
        <span class="tree-dtype">{row.leaf ? state.kindOf(own).dtype : dtypesOf(state, sums, row)}</span>
        <span class="tree-size" title={`${(share * 100).toPrecision(3)} % of the group; ${counted(sums.numel(row), "element")}`}>
          <span class="tree-track">
            <span class="tree-bar" style={{ width: `${Math.min(1, share) * 100}%` }} />
          </span>
          <span class="tree-bytes">{size === 0 && row.leaf && state.bytes(own) ? "" : bytes(size)}</span>
        </span>
        {norms && (
          <span class="tree-norm">
            {normSums && row.series > 1 ? (
              <Sparkline values={normSums.series(row, row.series)} title="norm by layer" />
            ) : (
              kin && row.leaf && (kin.get(kindOf(state.names.name(own)))?.length ?? 0) > 1 && (
                <Sparkline values={kin.get(kindOf(state.names.name(own)))!.map((n) => norms.norm[n]!)} title="norm in all layers" />
              )
            )}
            {Number.isNaN(norm) ? "" : shortNumber(norm)}
          </span>
        )}
      </div>
    );
  };

  const chosen = rows[active];
  return (
    <div class="tree-page">
      <div class="tree-tools">
        <SearchField q={q} />
        <span class="quiet" aria-live="polite">
          {found ? `${grouped(found.length)} of ${counted(state.names.count, "name")}` : counted(state.names.count, "name")}
        </span>
        <label class="quiet">
          sort{" "}
          <select value={sort} onChange={(event) => go({ sort: event.currentTarget.value === "name" ? undefined : event.currentTarget.value }, undefined, true)}>
            {SORTS.map((one) => (
              <option key={one} value={one} disabled={one === "norm" && !norms}>
                {one === "norm" && !norms ? "norm (compute first)" : one}
              </option>
            ))}
          </select>
        </label>
        <NormButton state={state} params={params} norms={norms} onNorms={setNorms} />
        <span class="tree-spacer" />
        {(opened !== undefined || each) && (
          <button type="button" class="small" onClick={() => go({ open: undefined, each: undefined }, undefined, true)}>
            Reset
          </button>
        )}
        <button type="button" class="small" onClick={() => go({ open: "-", ...(chosen && chosen.depth > 0 ? { at: undefined, name: undefined } : {}) }, undefined, true)}>
          Close all
        </button>
        <button type="button" class="small" title="save the names, shapes and sizes" onClick={() => saveNames(state, found, norms)}>
          CSV
        </button>
      </div>
      {state.unreadable.length > 0 && (
        <Details
          id="unreadable"
          class="tree-unreadable"
          summary={<span class="error">{counted(state.unreadable.length, "name")} without a shape: a file is missing</span>}
        >
          <ul>
            {state.unreadable.map(([one, why]) => (
              <li key={one}>
                <span class="mono">{shownName(one)}</span> <span class="quiet">{shownName(why)}</span>
              </li>
            ))}
          </ul>
        </Details>
      )}
      <div class={`tree-body${chosen ? " with-card" : ""}`}>
        <div class="tree-list" style={{ "--tree-shape": `${room}px`, "--tree-norm": curves ? "168px" : "84px" }}>
          <div class={`tree-row tree-head${norms ? " with-norm" : ""}`} aria-hidden="true">
            <span>name</span>
            <span>shape</span>
            <span>dtype</span>
            <span class="tree-right">size</span>
            {norms && <span class="tree-right">norm (L2)</span>}
          </div>
          {rows.length === 0 ? (
            <p class="quiet tree-empty">{found ? "No name has all of these words." : "There are no tensors."}</p>
          ) : (
            <VirtualList
              role="tree"
              aria-label="Tensors"
              tabIndex={0}
              aria-activedescendant={active >= 0 ? `${rowId}-${active}` : undefined}
              class={`tree${norms ? " with-norm" : ""}`}
              count={rows.length}
              rowHeight={ROW}
              row={draw}
              active={active}
              onKeyDown={onKeyDown}
            />
          )}
        </div>
        {chosen && <Card {...{ state, tree, row: chosen, sums, norms, normSums, marks, params }} />}
      </div>
    </div>
  );
}

function SearchField({ q }: { q: string }) {
  const { go } = useExplorer();
  return (
    <input
      type="search"
      class="field tree-search"
      placeholder="Search names: words, or a pattern such as *.q_proj.weight"
      aria-label="Search names"
      spellcheck={false}
      autocomplete="off"
      value={q}
      onInput={(event) => go({ q: event.currentTarget.value, open: undefined, each: undefined, at: undefined }, undefined, true)}
      onKeyDown={(event) => {
        if (event.key === "Escape") go({ q: undefined, open: undefined }, undefined, true);
        if (event.key === "ArrowDown" || event.key === "Enter") {
          event.preventDefault();
          event.currentTarget.closest(".tree-page")?.querySelector<HTMLElement>("[role=tree]")?.focus();
        }
      }}
    />
  );
}

interface NormProps {
  state: State;
  params: Record<string, string | undefined>;
  norms: Norms | null;
  onNorms(norms: Norms): void;
}

function NormButton({ state, params, norms, onNorms }: NormProps) {
  const { api } = useExplorer();
  const [share, setShare] = useState<number | null>(null);
  const [error, setError] = useState("");
  const controller = useRef<AbortController | null>(null);
  useEffect(() => () => controller.current?.abort(), []);
  const total = useMemo(() => {
    let sum = 0;
    for (let n = 0; n < state.names.count; n += 1) if (!state.twice.has(n)) sum += state.bytes(n);
    return sum;
  }, [state]);
  if (norms && norms.known >= state.names.count) return null;
  const start = () => {
    controller.current = new AbortController();
    const { signal } = controller.current;
    setShare(0);
    setError("");
    computeNorms(api, state, params, signal, (found, done) => {
      onNorms(found);
      setShare(done);
    }).then(
      () => setShare(null),
      (problem: Error) => {
        setShare(null);
        if (!signal.aborted) setError(problem.message);
      },
    );
  };
  if (share !== null) {
    return (
      <span class="tree-progress">
        <progress value={share} max={1} aria-label="norms computed" />
        <span class="quiet">{Math.round(share * 100)} %</span>
        <button type="button" class="small" onClick={() => controller.current?.abort()}>
          Stop
        </button>
      </span>
    );
  }
  return (
    <span class="tree-progress">
      <button type="button" class="small" title="read every tensor once" onClick={start}>
        {norms ? "Go on with norms" : `Norms (reads ${bytes(total)})`}
      </button>
      {error && <span class="error">{error}</span>}
    </span>
  );
}

interface MarkProps {
  marks: Marks | undefined;
  norms: Norms | null;
  row: Row;
  tree: Tree;
  sums: Sums;
}

const MOST_MARKS = 20_000; // tensors below a row that are looked at for its marks

function MarksOf({ marks, norms, row, tree, sums }: MarkProps) {
  const counts = useMemo(() => {
    const found = { tied: 0, idle: 0, lost: 0, problem: 0, odd: 0, all: 0 };
    const total = sums.tensors(row);
    if ((!marks && !norms) || total > MOST_MARKS) return found;
    for (const copy of row.copies) {
      const [low, high] = row.leaf ? [row.node.leaf, row.node.leaf + 1] : [row.node.low, row.node.high];
      for (let place = low; place < high; place += 1) {
        const n = tree.at(place + copy);
        const bits = marks ? marks.marks[n]! : 0;
        found.all += 1;
        if (bits & TIED) found.tied += 1;
        if (bits & IDLE) found.idle += 1;
        if (bits & LOST) found.lost += 1;
        if (bits & PROBLEM) found.problem += 1;
        if (norms && norms.odd[n]! > 0) found.odd += 1;
      }
    }
    return found;
  }, [marks, norms, row, tree]);
  const one = counts.all === 1;
  const of = (count: number) => (one ? "" : ` (${grouped(count)} of ${grouped(counts.all)})`);
  return (
    <>
      {counts.lost > 0 && <Mark kind="error" text="lost" title={`elements are in files that cannot be read${of(counts.lost)}`} />}
      {counts.problem > 0 && <Mark kind="warning" text="!" title={`a problem names it${of(counts.problem)}`} />}
      {counts.odd > 0 && <Mark kind="error" text="NaN" title={`has NaN or infinite elements${of(counts.odd)}`} />}
      {counts.tied > 0 && one && <Mark kind="note" text="tied" title="the same tensor as another name; it is counted once" />}
      {counts.idle > 0 && counts.idle === counts.all && (
        <Mark kind="note" text="no moments" title="the optimizer has no state for it: it is frozen, or no parameter" />
      )}
    </>
  );
}

function Mark({ kind, text, title }: { kind: string; text: string; title: string }) {
  return (
    <span class={`tree-mark ${kind}`} title={title}>
      {text}
    </span>
  );
}

/** The width of the column of shapes and numbers of tensors, in pixels: what the longest takes, to some limit. */
function shapeRoom(state: State): number {
  const longest = state.kinds.reduce((n, { shape }) => Math.max(n, shape.join(", ").length + 2), `${grouped(state.names.count)} tensors`.length);
  return Math.round(Math.min(148, Math.max(64, 7.9 * longest + 4)));
}

const MOST_KIN = 20_000; // names of which layers are looked up that are too few to be folded

/** A name with * for the number of its layer. */
function kindOf(name: string): string {
  return name.replace(/(^|\.)\d+(?=\.|$)/, "$1*");
}

/** The numbers of the names of each kind, in the order of layers; null if no kind is in several layers, or there are many names. */
function kinOf(state: State): Map<string, number[]> | null {
  if (state.names.count > MOST_KIN) return null;
  const found = new Map<string, number[]>();
  for (let n = 0; n < state.names.count; n += 1) {
    const kind = kindOf(state.names.name(n));
    const held = found.get(kind);
    if (held) held.push(n);
    else found.set(kind, [n]);
  }
  const layer = (n: number) => Number(/(?:^|\.)(\d+)(?=\.|$)/.exec(state.names.name(n))?.[1] ?? 0);
  for (const held of found.values()) held.sort((a, b) => layer(a) - layer(b));
  return [...found.values()].some((held) => held.length > 1) ? found : null;
}

/** What a row is called. A name with line feeds has stand-ins in the tree: the end of the true one is shown. */
function labelOf(row: Row, name: string | undefined): string {
  return shownTensor(name === undefined ? row.label : name.slice(Math.max(0, name.length - row.label.length)));
}

/** Whether a row is above the row at an index. */
function above(rows: readonly Row[], index: number, row: Row): boolean {
  for (let n = rows[index]?.parent ?? -1; n >= 0; n = rows[n]!.parent) if (rows[n] === row) return true;
  return false;
}

function stands(tree: Tree, row: Row, number: number): boolean {
  return row.leaf && row.copies.some((copy) => tree.at(row.node.leaf + copy) === number);
}

function dtypesOf(state: State, sums: Sums, row: Row): string {
  if (sums.tensors({ ...row, copies: [0] }) > 20_000) return "";
  const found = new Set<string>();
  for (const n of sums.numbers(row)) found.add(state.kindOf(n).dtype);
  return found.size <= 2 ? [...found].join(", ") : `${found.size} dtypes`;
}

function weightOf(sort: string, sums: Sums, state: State, tree: Tree, norms: NormSums | null): Weight {
  if (sort === "size") return (node, leaf, copies) => sums.bytes({ node, leaf, copies });
  if (sort === "norm" && norms) return (node, leaf, copies) => norms.norm({ node, leaf, copies });
  if (sort !== "dtype") return null;
  const dtypes = [...new Set(state.kinds.map(({ dtype }) => dtype))].sort();
  return (node, leaf) => -dtypes.indexOf(state.kindOf(tree.at(leaf ? node.leaf : node.low)).dtype);
}

function saveNames(state: State, found: Uint32Array | null, norms: Norms | null): void {
  const numbers = found ?? upTo(state.names.count);
  const rows = Array.from(numbers, (n) => [
    state.names.name(n),
    state.kindOf(n).dtype,
    `[${state.kindOf(n).shape.join(", ")}]`,
    state.numel(n),
    state.bytes(n),
    state.tied.get(n) ?? "",
    ...(norms ? [norms.norm[n]!, norms.largest[n]!] : []),
  ]);
  saveCsv("tensors", ["name", "dtype", "shape", "elements", "bytes", "tied to", ...(norms ? ["norm", "largest"] : [])], rows);
}
