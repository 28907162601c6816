// The end of a report: what it has left out, and how to see it.

import type { LeftOut } from "../transport";
import { CopyButton } from "../ui/python";
import { grouped, shownName } from "../ui/text";
import "./reportnote.css";

export function ReportNote({ left, size, read, serve, larger }: LeftOut) {
  if (!left.length) {
    return (
      <footer class="report-note">
        This report has the overview of each page and small pictures of all tensors. Every element: <Command text={serve} />
      </footer>
    );
  }
  const why = (["size", "read"] as const).filter((one) => left.some(([, , , reason]) => reason === one));
  const limits = { size: `is at most ${size} large`, read: `reads at most ${read}` };
  return (
    <footer class="report-note">
      <details>
        <summary>
          This report {why.map((one) => limits[one]).join(" and ")}: some pictures and values are left out. All of them: <code>{shownName(serve, 160)}</code>
        </summary>
        <table>
          <tbody>
            {left.map(([what, held, all, reason]) => (
              <tr key={what}>
                <th scope="row">{what}</th>
                <td>
                  {grouped(held)} {all ? `of ${grouped(all)}` : ""} are here
                </td>
                <td>{reason === "read" ? "the others read too much" : "the others did not fit"}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <p>
          All values: <Command text={serve} />
        </p>
        {why.map((one) => (
          <p key={one}>
            {one === "size" ? "A larger report: " : "A report that reads more: "}
            <Command text={one === "size" ? `${larger} --max-size 50MiB` : `${larger} --max-read 1TiB`} />
          </p>
        ))}
      </details>
    </footer>
  );
}

function Command({ text }: { text: string }) {
  return (
    <span class="report-command">
      <code>{shownName(text, 400)}</code> <CopyButton text={text} label="copy the command" />
    </span>
  );
}
