// The mesh as a grid: what each rank holds, by file, and what is lost with files that cannot be read.

import { useMemo } from "preact/hooks";
import type { Problem } from "../api";
import { useExplorer, useLoaded } from "../context";
import { gridOf, meshText, rankText, type File, type Rank, type Ranks } from "../ranks/mesh";
import { colourTable, css } from "../ui/colours";
import { Ending } from "../ui/ending";
import { Failure } from "../ui/failure";
import { Figure } from "../ui/figure";
import { Grid } from "../ui/grid";
import { Python, useLines } from "../ui/python";
import { DataTable, type Column } from "../ui/table";
import { bytes, counted, grouped, shownName } from "../ui/text";
import "./ranks.css";

const VIRIDIS = colourTable("viridis");

export function RanksPage() {
  const { api, about, route, go } = useExplorer();
  const { step, side, file, of = "bytes", states = "all" } = route.params;
  const own = (about.sides[side === "b" ? 1 : 0] ?? about.sides[0]!).state;
  const state = states === "all" ? undefined : (route.params["state"] ?? own);
  const loaded = useLoaded((signal) => api.json<Ranks>("ranks", { step, side, state }, signal), [step, side, state]);
  const found = loaded.value;
  const asked = { step, side };
  const steps = useLoaded((signal) => (api.holds("ranks/steps", asked) ? api.json<{ findings: Problem[] }>("ranks/steps", asked, signal) : Promise.resolve({ findings: [] })), [step, side]);
  const lines = useLines({ step, side, of: of === "bytes" ? undefined : of, states: state && "own", state, file: api.live ? file : undefined });
  const grid = useMemo(() => found && gridOf(found, of), [found, of]);
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!found || !grid) return <p class="quiet">Counting what each rank holds …</p>;
  const chosen = file === undefined ? -1 : found.files.findIndex(({ path }) => path === file);
  const choose = (cell: Rank | undefined) => {
    const first = cell?.files[0];
    if (first !== undefined) go({ file: found.files[first]!.path }, undefined, true);
  };
  const active = grid.cells.findIndex((rank) => rank && chosen >= 0 && rank.files.includes(chosen));
  const rank = active >= 0 ? grid.cells[active]! : null;
  const damaged = found.files.filter(({ missing, problems }) => missing || problems.length);
  return (
    <div class="ranks">
      <Figure
        title={grid.isMesh ? "Ranks" : "Files"}
        name="ranks"
        note={`${grid.isMesh ? meshText(found.mesh) : `${counted(found.files_in_all, "file")}, not grouped by rank`}; colours are ${of === "bytes" ? "bytes of elements" : `numbers of ${of}`}`}
        tools={
          <>
            <span role="group" aria-label="of" class="choices">
              {["bytes", "tensors", ...(grid.isMesh ? ["files"] : [])].map((one) => (
                <button key={one} type="button" class="small" aria-pressed={one === of} onClick={() => go({ of: one === "bytes" ? undefined : one }, undefined, true)}>
                  {one}
                </button>
              ))}
            </span>
            <select aria-label="states" value={states} disabled={!api.live} onChange={(event) => go({ states: event.currentTarget.value === "all" ? undefined : event.currentTarget.value }, undefined, true)}>
              <option value="all">all states</option>
              <option value="weights">chosen state only</option>
            </select>
          </>
        }
        python={lines["ranks"]}
      >
        <Grid
          numbers
          rows={grid.rows}
          columns={grid.columns}
          values={grid.values}
          label={grid.isMesh ? "What each rank holds" : "What each file holds"}
          rowTitle={grid.rowTitle}
          columnTitle={grid.columnTitle}
          colour={(share) => css(VIRIDIS, share)}
          range={grid.range}
          format={(value) => (of === "bytes" ? bytes(value) : grouped(value))}
          detail={(r, c) => detailOf(grid.cells[r * grid.columns.length + c], found)}
          mark={(r, c) => markOf(grid.cells[r * grid.columns.length + c], found.files)}
          onCell={(r, c) => choose(grid.cells[r * grid.columns.length + c])}
          active={active >= 0 ? [Math.floor(active / grid.columns.length), active % grid.columns.length] : null}
          unit={of === "bytes" ? 1024 : 1}
          legend={`${of} ${grid.isMesh ? "on a rank" : "in a file"}`}
        />
      </Figure>
      {!!steps.value?.findings.length && (
        <section>
          <h2>Steps of the ranks</h2>
          <ul class="problems">
            {steps.value.findings.map((one) => (
              <li key={one.text}>
                <strong class={one.severity}>{one.severity}</strong> {shownName(one.text, 2000)} <code class="quiet">{one.code}</code>
                {one.advice && <span class="advice">{one.advice}</span>}
              </li>
            ))}
          </ul>
        </section>
      )}
      {(damaged.length > 0 || found.lost_in_all > 0) && <Damage found={found} files={damaged} />}
      <section>
        <h2>{rank?.rank ? `Files of rank ${rankText(rank.rank, found.mesh)}` : "Files"}</h2>
        <DataTable
          id="files"
          caption="files"
          columns={FILES}
          rows={rank?.rank ? rank.files.map((n) => found.files[n]!) : found.files}
          rowKey={({ path }) => path}
          active={file}
          sort={{ key: "path", down: false }}
          onRow={({ path }) => go({ file: path }, undefined, true)}
          height={320}
          note={
            rank?.rank ? (
              <button type="button" class="small" onClick={() => go({ file: undefined }, undefined, true)}>
                show all files
              </button>
            ) : found.files_in_all > found.files.length ? (
              `the first ${grouped(found.files.length)} of ${grouped(found.files_in_all)} files`
            ) : undefined
          }
        />
      </section>
      <Python code={lines["files"]} />
      {chosen >= 0 && api.live && <Holding file={found.files[chosen]!} state={state} />}
      <Python code={lines["file"]} />
    </div>
  );
}

function Damage({ found, files }: { found: Ranks; files: File[] }) {
  const { go } = useExplorer();
  return (
    <section>
      <h2 class="error">Damage</h2>
      <ul class="problems">
        {files.slice(0, 50).map((file) => (
          <li key={file.path}>
            <span class="mono">{shownName(file.path)}</span>
            {file.missing && !file.problems.length && <span class="error"> {shownName(file.missing)}</span>}
            {file.problems.map((problem, n) => (
              <span key={n}>
                {" "}
                <strong class={problem.severity}>{problem.code}</strong> {shownName(problem.text, 1000)}
                {problem.advice && <span class="advice">{problem.advice}</span>}
              </span>
            ))}
          </li>
        ))}
      </ul>
      {files.length > 50 && <p class="quiet">and {grouped(files.length - 50)} more files</p>}
      {found.lost_in_all > 0 && (
        <>
          <p>
            {grouped(found.lost_in_all)} {found.lost_in_all === 1 ? "tensor has" : "tensors have"} elements that are in no file that can be read. The others can be read whole.
          </p>
          <DataTable
            id="lost"
            caption="lost"
            columns={LOST}
            rows={found.lost}
            rowKey={([state, name]) => `${state} ${name}`}
            onRow={([state, name]) => go({ state, name }, "tree")}
            height={260}
            note={found.lost_in_all > found.lost.length ? `the first ${grouped(found.lost.length)} of ${grouped(found.lost_in_all)}` : undefined}
          />
        </>
      )}
    </section>
  );
}

type Piece = [state: string, name: string, numel: number, nbytes: number, offset: number | null];

function Holding({ file, state }: { file: File; state: string | undefined }) {
  const { api, route, go } = useExplorer();
  const { step, side } = route.params;
  const loaded = useLoaded((signal) => api.json<{ pieces: Piece[]; more: boolean }>("ranks/file", { step, side, state, path: file.path }, signal), [file.path, step, side, state]);
  if (loaded.error) return <Failure error={loaded.error} />;
  if (!loaded.value) return <p class="quiet">Listing what the file holds …</p>;
  const { pieces, more } = loaded.value;
  return (
    <section>
      <h2>
        Tensors in <span class="mono">{shownName(file.path)}</span>
      </h2>
      <DataTable
        id="pieces"
        caption="pieces"
        columns={PIECES}
        rows={pieces}
        rowKey={(piece) => piece.join(" ")}
        onRow={([of, name]) => go({ state: of, name }, "tree")}
        height={360}
        note={more ? `the first ${grouped(pieces.length)} pieces` : undefined}
      />
    </section>
  );
}

function detailOf(rank: Rank | undefined, { files, mesh }: Ranks): string {
  if (!rank) return "no file names this rank";
  const names = rank.files.slice(0, 4).map((n) => shownName(files[n]!.path));
  const more = rank.files.length > 4 ? `\nand ${rank.files.length - 4} more files` : "";
  const where = rank.rank ? `rank ${rankText(rank.rank, mesh)}` : "";
  const lost = rank.missing ? `\n${bytes(rank.missing)} in files that cannot be read` : "";
  const problems = rank.files.flatMap((n) => files[n]!.problems.map(({ code }) => code));
  return `${where ? `${where}\n` : ""}${bytes(rank.nbytes)} in ${counted(rank.tensors, "tensor")}${lost}${problems.length ? `\n${[...new Set(problems)].join(", ")}` : ""}\n${names.join("\n")}${more}`;
}

function markOf(rank: Rank | undefined, files: File[]): string {
  if (!rank) return "";
  if (rank.missing || rank.files.some((n) => files[n]!.missing)) return "×";
  return rank.files.some((n) => files[n]!.problems.length > 0) ? "!" : "";
}

const FILES: Column<File>[] = [
  { key: "path", title: "file", value: (file) => file.path, cell: (file) => <Ending text={file.path} />, width: "minmax(240px,4fr)" },
  { key: "size", title: "size of the file", number: true, value: (file) => file.size, cell: (file) => (file.size === null ? "missing" : bytes(file.size)), width: "108px" },
  { key: "bytes", title: "of the tensors", number: true, value: (file) => file.nbytes, cell: (file) => bytes(file.nbytes), width: "100px" },
  { key: "tensors", title: "tensors", number: true, value: (file) => file.tensors, width: "72px" },
  {
    key: "problems", title: "problems", width: "minmax(90px,1fr)",
    value: (file) => [file.missing ? "missing" : "", ...file.problems.map(({ code }) => code)].filter(Boolean).join(", "),
    cell: (file) => <span class="error">{[file.missing ? "missing" : "", ...file.problems.map(({ code }) => code)].filter(Boolean).join(", ")}</span>,
  },
];

const LOST: Column<[string, string, number]>[] = [
  { key: "state", title: "state", value: ([state]) => state, width: "120px" },
  { key: "name", title: "tensor", value: ([, name]) => name, cell: ([, name]) => <Ending text={name} />, width: "minmax(240px,2fr)" },
  { key: "lost", title: "lost elements", number: true, value: ([, , lost]) => lost, width: "140px" },
];

const PIECES: Column<Piece>[] = [
  { key: "offset", title: "offset", number: true, value: ([, , , , offset]) => offset, cell: ([, , , , offset]) => (offset === null ? "packed" : grouped(offset)), width: "120px" },
  { key: "bytes", title: "bytes", number: true, value: ([, , , nbytes]) => nbytes, width: "120px" },
  { key: "elements", title: "elements", number: true, value: ([, , numel]) => numel, width: "120px" },
  { key: "state", title: "state", value: ([state]) => state, width: "110px" },
  { key: "name", title: "tensor", value: ([, name]) => name, cell: ([, name]) => <Ending text={name} />, width: "minmax(240px,2fr)" },
];
