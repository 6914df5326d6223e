//! The program `glm`: parse, dispatch, and an error becomes one message and an exit code.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use glm::cli::Cli;
use glm::commands::{self, Outcome};

fn main() -> ExitCode {
    // The version is made at run time because it names the kernels of this CPU.
    let command = Cli::command().version(commands::version()).long_version(commands::version());
    let cli = match command.try_get_matches().and_then(|m| Cli::from_arg_matches(&m)) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version come here too; printing fails only when nobody reads.
            let _ = e.print();
            return ExitCode::from(e.exit_code() as u8);
        }
    };
    match commands::dispatch(cli.command) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Incomplete) => ExitCode::from(1),
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        // A reader that has seen enough, such as `head`, is not a failure.
        Err(e) if commands::is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            commands::print_error(&e);
            ExitCode::from(if e.is::<commands::Usage>() { 2 } else { 1 })
        }
    }
}
